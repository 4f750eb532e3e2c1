"""Building blocks, attention blocks and the detection model."""
