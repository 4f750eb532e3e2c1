"""The model that a training starts from: model file, attention, pretrained weights, frozen layers."""

from __future__ import annotations

from typing import Any

from models.yolo import DetectionModel, find_weights, has_attention
from utils import UserError
from utils.checkpoint import Weights, read_weights, transfer_weights
from utils.config import load_model_file
from utils.options import TrainOptions

DEFAULT_MODEL = "models/attention/yolov5n-cbam.yaml"
PLAIN_MODEL = "models/yolov5n.yaml"


def build_model(options: TrainOptions, names: tuple[str, ...]) -> DetectionModel:
    """The model of `--cfg` or `--weights` with the data set's classes, pretrained tensors carried over."""
    weights = read_weights(find_weights(options.weights)) if options.weights else None
    cfg = options.cfg or (weights.model_file if weights else PLAIN_MODEL if options.attention else DEFAULT_MODEL)
    start = attention_start(options.attention_init, cfg, weights)
    model = DetectionModel(cfg, names=names, attention=options.attention, attention_init=start)
    if weights:
        carried = transfer_weights(weights, model.state_dict(), names, keep_anchors=bool(options.cfg))
        model.load_state_dict(carried.state, strict=False)
        print(f"{options.weights}: {carried.summary()}")
        if not carried.transferred:
            raise UserError(f"{options.weights}: no tensor fits the model; choose weights of its size")
    return model


def attention_start(wanted: str, cfg: str | dict[str, Any], weights: Weights | None) -> str:
    """How attention blocks start: as asked for, else as the model file says, else by where the weights come from.

    Weights of a model with attention keep the form they were trained in; those without get blocks that start as
    the identity, so that nothing they know is lost.
    """
    asked = (
        wanted if wanted != "auto" else (cfg if isinstance(cfg, dict) else load_model_file(cfg)).get("attention_init")
    )
    if asked not in (None, "auto"):
        return asked
    if weights is None:
        return "paper"
    lines = [*weights.model_file["backbone"], *weights.model_file["head"]]
    attended = any(has_attention(line[2]) for line in lines)
    return weights.model_file.get("attention_init", "paper") if attended else "identity"


def freeze_layers(model: DetectionModel, freeze: tuple[int, ...]) -> None:
    """Exclude layers from training: 0 to N-1 for one number N, else just the numbers given."""
    frozen = set(range(freeze[0]) if len(freeze) == 1 else freeze)
    unknown = frozen - set(range(len(model.layers)))
    if unknown:
        raise UserError(f"--freeze {max(unknown)}: the model's layers are 0 to {len(model.layers) - 1}")
    for index in frozen:
        model.model[index].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("--freeze: nothing is left to train")
    if frozen:
        print(f"frozen layers: {', '.join(map(str, sorted(frozen)))}")
