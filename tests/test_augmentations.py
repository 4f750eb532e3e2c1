"""Augmentations against values worked out by hand and against other ways to the same result."""

import itertools
import json
import math
from dataclasses import replace

import cv2
import numpy as np
import pytest

from utils import ROOT
from utils import augmentations as aug
from utils.config import Hyperparameters

REFERENCE = ROOT.parent / "shared" / "reference" / "peer_0.json"
STILL = replace(Hyperparameters(), degrees=0.0, translate=0.0, scale=0.0, shear=0.0, perspective=0.0)


def boxes(*rows) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 5)


def plain(*rows) -> aug.Objects:
    return aug.Objects(boxes(*rows), np.zeros((0, 2), np.float32), np.zeros(len(rows), np.int64))


def outlined(polygons: list, label: int = 0) -> aug.Objects:
    """Objects that have polygons, with the boxes around these."""
    arrays = [np.array(polygon, np.float32).reshape(-1, 2) for polygon in polygons]
    rows = [(label, *polygon.min(0), *polygon.max(0)) for polygon in arrays]
    return aug.Objects(boxes(*rows), np.concatenate(arrays), np.array([len(a) for a in arrays]))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


# letterbox


def test_letterbox_equals_yolov5s():
    if not REFERENCE.is_file():
        pytest.skip(f"{REFERENCE} is not there")
    cases = json.loads(REFERENCE.read_text())["letterbox"]
    assert len(cases) == 24
    for case in cases:
        shape = case["new_shape"]
        image, ratio, pad = aug.letterbox(
            np.zeros((*case["in"], 3), np.uint8),
            shape if isinstance(shape, int) else tuple(shape),
            auto=case["auto"],
            scaleup=case.get("scaleup", True),
            scale_fill=case.get("scaleFill", False),
        )
        assert (list(image.shape), list(ratio), list(pad)) == (case["out"], case["ratio"], case["pad"]), case


def test_letterbox_puts_the_image_in_the_middle():
    image, ratio, pad = aug.letterbox(np.zeros((10, 25, 3), np.uint8), (25, 25))
    assert ratio == (1, 1) and pad == (0, 7.5)
    rows = np.flatnonzero((image == 0).all((1, 2)))
    assert rows.tolist() == list(range(7, 17))  # the odd pixel is below
    turned, _, pad = aug.letterbox(np.zeros((25, 10, 3), np.uint8), (25, 25))
    assert pad == (7.5, 0) and (turned.transpose(1, 0, 2) == image).all()
    assert (np.delete(image, rows, 0) == 114).all()


def test_letterbox_scales_up_only_when_asked():
    small = np.full((8, 8, 3), 7, np.uint8)
    up, ratio, _ = aug.letterbox(small, 16)
    assert (up == 7).all() and up.shape == (16, 16, 3) and ratio == (2, 2)
    kept, ratio, pad = aug.letterbox(small, 16, scaleup=False, color=0)
    assert (kept[4:12, 4:12] == 7).all() and kept.sum() == small.sum() and ratio == (1, 1) and pad == (4, 4)


def test_letterbox_of_a_line_keeps_a_pixel():
    image, _, _ = aug.letterbox(np.zeros((1, 3000, 3), np.uint8), 320)
    assert image.shape == (320, 320, 3) and (image == 0).any()


# coordinates


def test_fractions_and_pixels_are_inverse():
    rng = np.random.default_rng(0)
    size = rng.uniform(0.1, 0.3, (20, 2))
    rows = np.concatenate((rng.integers(0, 5, (20, 1)), rng.uniform(0.2, 0.8, (20, 2)), size), 1).astype(np.float32)
    objects = aug.to_pixels(rows, np.zeros((0, 2), np.float32), np.zeros(20, int), (640, 480))
    np.testing.assert_allclose(aug.to_fractions(objects.boxes, (640, 480)), rows, atol=1e-6)
    assert objects.boxes.dtype == np.float32


def test_to_pixels_by_hand():
    rows, points = boxes((3, 0.5, 0.25, 0.2, 0.1)), np.float32([[0, 0], [1, 0.5], [0.5, 1]])
    objects = aug.to_pixels(rows, points, np.array([3]), (100, 200), (10, -20))
    np.testing.assert_allclose(objects.boxes, [[3, 50, 20, 70, 40]], rtol=1e-6)
    np.testing.assert_allclose(objects.points, [[10, -20], [110, 80], [60, 180]])


def test_to_fractions_clips():
    np.testing.assert_allclose(aug.to_fractions(boxes((1, -10, 5, 10, 15)), (20, 10)), [[1, 0.25, 0.75, 0.5, 0.5]])
    assert aug.to_fractions(boxes(), (20, 10)).shape == (0, 5)


# mosaic


def test_mosaic_draws_the_middle_half_and_always_the_image():
    rng = np.random.default_rng(0)
    drawn = [aug.draw_mosaic(rng, 3, 10, 100) for _ in range(400)]
    assert all(3 in mosaic.indices and len(mosaic.indices) == 4 for mosaic in drawn)
    assert {i for mosaic in drawn for i in mosaic.indices} == set(range(10))
    places = [mosaic.indices.index(3) for mosaic in drawn]
    assert min(places.count(place) for place in range(4)) > 60  # about 100 each
    centres = np.array([mosaic.centre for mosaic in drawn])
    assert centres.min() >= 50 and centres.max() < 150 and np.ptp(centres, axis=0).min() > 90


def test_tiles_meet_at_the_centre():
    tiles = [np.full((6, 8, 3), value, np.uint8) for value in (1, 2, 3, 4)]
    canvas, offsets = aug.paste_tiles(tiles, aug.Mosaic((0, 1, 2, 3), (5, 9)), 8)
    assert offsets == [(-3, 3), (5, 3), (-3, 9), (5, 9)]
    expected = np.full((16, 16), 114)
    expected[3:9, :5], expected[3:9, 5:13], expected[9:15, :5], expected[9:15, 5:13] = 1, 2, 3, 4
    np.testing.assert_array_equal(canvas[:, :, 1], expected)


def test_tiles_are_cut_on_the_far_side_from_the_centre():
    picture = noise(8, 8)
    canvas, offsets = aug.paste_tiles([picture] * 4, aug.Mosaic((0, 0, 0, 0), (4, 12)), 8)
    for x, y in offsets:
        for row, column in ((0, 0), (0, 7), (7, 0), (7, 7), (3, 4)):
            if 0 <= y + row < 16 and 0 <= x + column < 16:
                assert (canvas[y + row, x + column] == picture[row, column]).all()
    assert offsets == [(-4, 4), (4, 4), (-4, 12), (4, 12)]


# copy-paste


def test_copy_paste_mirrors_pixels_and_polygon():
    image = noise(40, 100)
    before = image.copy()
    square = [(10, 10), (20, 10), (20, 30), (10, 30)]
    pasted, objects = aug.copy_paste(image, outlined([square], label=5), np.array([0]))
    np.testing.assert_array_equal(objects.boxes, boxes((5, 10, 10, 20, 30), (5, 80, 10, 90, 30)))
    np.testing.assert_array_equal(objects.polygon(1), [(90, 10), (80, 10), (80, 30), (90, 30)])
    # pixel column c of the object lies at 99 - c in the mirror image
    np.testing.assert_array_equal(pasted[10:31, 79:90], before[10:31, 10:21][:, ::-1])
    changed = (pasted != before).any(2)
    assert changed[10:31, 79:90].mean() > 0.9
    changed[10:31, 79:90] = False
    assert not changed.any()
    np.testing.assert_array_equal(image, before)  # the input is left alone


def test_copy_paste_does_not_hide_others():
    victim = [(80, 10), (90, 10), (90, 30), (80, 30)]
    middle = [(10, 10), (20, 10), (20, 30), (10, 30)]
    image = noise(40, 100)
    same, objects = aug.copy_paste(image, outlined([middle, victim]), np.array([0]))
    assert len(objects.boxes) == 2 and (same == image).all()
    # 2 of 10 columns hidden are fine, 3 are not
    for shift, count in ((8, 3), (7, 2)):
        moved = [(x + shift, y) for x, y in victim]
        _, objects = aug.copy_paste(image, outlined([middle, moved]), np.array([0]))
        assert len(objects.boxes) == count


def test_copy_paste_draws_a_share_of_the_outlined():
    rng = np.random.default_rng(0)
    lengths = np.array([0, 5, 0, 4, 3, 7])
    for _ in range(20):
        chosen = aug.draw_copy_paste(rng, lengths, 0.5)
        assert len(set(chosen)) == 2 and set(chosen) <= {1, 3, 4, 5}
    assert len(aug.draw_copy_paste(rng, lengths, 0.0)) == 0
    assert len(aug.draw_copy_paste(rng, np.zeros(4, int), 1.0)) == 0


# perspective


def test_still_perspective_changes_nothing():
    image, objects = noise(30, 50), plain((1, 5, 6, 20, 25))
    p = aug.draw_perspective(np.random.default_rng(0), STILL, (30, 50))
    out, moved = aug.random_perspective(image, objects, p)
    np.testing.assert_array_equal(out, image)
    np.testing.assert_allclose(moved, objects.boxes, atol=1e-4)


def test_negative_border_cuts_out_the_middle():
    image, objects = noise(40, 40), plain((1, 15, 12, 25, 30), (2, 0, 0, 9, 9))
    p = aug.draw_perspective(np.random.default_rng(0), STILL, (40, 40), border=-10)
    out, moved = aug.random_perspective(image, objects, p)
    np.testing.assert_array_equal(out, image[10:30, 10:30])
    np.testing.assert_allclose(moved, [[1, 5, 2, 15, 20]], atol=1e-4)


def test_quarter_turn_by_hand():
    """Turning by 90° counter-clockwise around the middle takes (x, y) to (y, side - x)."""
    hyp = replace(STILL, degrees=90.0)

    class Highest:
        def uniform(self, low, high, size=None):
            return high if size is None else np.full(size, high, float)

    p = aug.draw_perspective(Highest(), hyp, (40, 40))
    _, moved = aug.random_perspective(noise(40, 40), plain((0, 4, 10, 12, 30)), p)
    np.testing.assert_allclose(moved, [[0, 10, 28, 30, 36]], atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_boxes_follow_the_pixels(seed):
    """A bright rectangle stays inside its box, and for a mere enlargement and shift fills it."""
    rng = np.random.default_rng(seed)
    turned = seed % 2 == 0
    hyp = replace(Hyperparameters(), translate=0.1, scale=0.3)
    if turned:
        hyp = replace(hyp, degrees=20.0, shear=8.0, perspective=0.0008)
    image = np.zeros((120, 160, 3), np.uint8)
    image[50:80, 60:110] = 255
    p = aug.draw_perspective(rng, hyp, (120, 160))
    out, moved = aug.random_perspective(image, plain((0, 60, 50, 110, 80)), p)
    rows, columns = np.nonzero(out[:, :, 0] > 200)
    (x1, y1, x2, y2) = moved[0, 1:]
    assert x1 - 1.5 <= columns.min() and columns.max() + 1 <= x2 + 1.5
    assert y1 - 1.5 <= rows.min() and rows.max() + 1 <= y2 + 1.5
    slack = 2.5 if not turned else 6
    assert columns.min() - x1 < slack and x2 - columns.max() - 1 < slack
    assert rows.min() - y1 < slack and y2 - rows.max() - 1 < slack


def test_parameters_stay_in_their_ranges():
    rng = np.random.default_rng(0)
    hyp = replace(STILL, scale=0.5, translate=0.1)
    drawn = [aug.draw_perspective(rng, hyp, (100, 200)) for _ in range(500)]
    scales = np.array([p.scale for p in drawn])
    assert 0.5 <= scales.min() < 0.55 and 1.45 < scales.max() <= 1.5
    middles = np.array([p.matrix @ (100, 50, 1) for p in drawn])
    assert (middles[:, 2] == 1).all()
    np.testing.assert_allclose(middles[:, 0].min(), 80, atol=1)
    np.testing.assert_allclose(middles[:, 1].max(), 60, atol=1)
    np.testing.assert_allclose([p.matrix[0, 0] for p in drawn], scales)


def sampled_box(polygon: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Box around the points of a densely sampled outline that lie in the image; zeros if none does."""
    closed = np.concatenate((polygon, polygon[:1]))
    t = np.linspace(0, 1, 6001)[:, None]
    dense = np.concatenate([a + t * (b - a) for a, b in itertools.pairwise(closed)])
    dense = dense[((dense >= 0) & (dense <= size)).all(1)]
    return np.concatenate((dense.min(0), dense.max(0))) if len(dense) else np.zeros(4)


def test_visible_boxes_equal_dense_sampling():
    rng = np.random.default_rng(0)
    polygons = [rng.uniform(-60, 160, (int(n), 2)) for n in rng.integers(3, 9, 40)]
    polygons += [np.array([[-5, -5], [-1, -5], [-1, -1.0]]), np.array([[10, 10], [20, 10], [20, 20], [10, 20.0]])]
    polygons += [np.array([[-50, 30], [150, 30], [150, -20.0]]), np.array([[0, 0], [100, 0], [100, 80], [0, 80.0]])]
    lengths = np.array([len(p) for p in polygons])
    found = aug._visible_boxes(np.concatenate(polygons), lengths, (100, 80))
    np.testing.assert_allclose(found, [sampled_box(p, (100, 80)) for p in polygons], atol=0.06)


def test_polygon_gives_a_tighter_box_than_corners():
    """A diamond turned by 45° is a square: the outline fits it, the turned corners of its box do not."""
    diamond = [(50, 20), (80, 50), (50, 80), (20, 50)]
    both = aug.Objects.joined([outlined([diamond]), plain((1, 20, 20, 80, 80))])
    cos = math.cos(math.pi / 4)
    turn = np.array([[cos, -cos, 50], [cos, cos, 50 - 100 * cos], [0, 0, 1]])
    _, moved = aug.random_perspective(noise(100, 100), both, aug.Perspective(turn, 1.0, (100, 100)))
    half = 30 * cos
    np.testing.assert_allclose(moved[0], [0, 50 - half, 50 - half, 50 + half, 50 + half], atol=1e-3)
    np.testing.assert_allclose(moved[1], [1, 50 - 60 * cos, 50 - 60 * cos, 50 + 60 * cos, 50 + 60 * cos], atol=1e-3)


def test_no_objects_pass_through_everything():
    image = noise(40, 40)
    p = aug.draw_perspective(np.random.default_rng(0), Hyperparameters(), (40, 40), -10)
    out, moved = aug.random_perspective(image, plain(), p)
    assert out.shape == (20, 20, 3) and moved.shape == (0, 5)
    assert aug.flip(image, moved, aug.Flips(True, True))[1].shape == (0, 5)
    assert aug.copy_paste(image, plain(), np.zeros(0, int))[1].boxes.shape == (0, 5)


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        ((0, 0, 10, 10), True),
        ((0, 0, 2, 10), False),  # not wider than 2 px
        ((0, 0, 2.1, 10), True),
        ((0, 0, 10, 1), False),
        ((0, 0, 3, 3.3), False),  # 9.9 % of 100
        ((0, 0, 3, 3.4), True),
        ((0, 0, 301, 3), False),  # 100 times as wide as high
        ((0, 0, 299, 3), True),
    ],
)
def test_box_candidates(after, kept):
    before = np.array([[0, 0, 10, 10]], np.float32)
    assert aug.box_candidates(before, np.array([after], np.float32), 0.1).tolist() == [kept]


def test_cut_off_objects_leave_at_a_tenth_or_a_hundredth():
    """5 % of a 100 px square is left: too little for a box, enough for a polygon."""
    square = [(0, 0), (100, 0), (100, 100), (0, 100)]
    both = aug.Objects.joined([outlined([square], label=1), plain((2, 0, 0, 100, 100))])
    shift = np.array([[1, 0, -95], [0, 1, 0], [0, 0, 1.0]])
    _, moved = aug.random_perspective(noise(100, 100), both, aug.Perspective(shift, 1.0, (100, 100)))
    np.testing.assert_allclose(moved, [[1, 0, 0, 5, 100]], atol=1e-4)


def test_what_is_left_is_judged_against_the_enlarged_object():
    """Twice as large, a 40 px square shows 8 of its 80 px: 9.5 % of it must not count as 38 %."""
    grow = np.array([[2, 0, -72.4], [0, 2, 0], [0, 0, 1.0]])
    for shift, kept in ((-72.4, 0), (-71.6, 1)):
        grow[0, 2] = shift
        _, moved = aug.random_perspective(noise(80, 80), plain((0, 0, 0, 40, 40)), aug.Perspective(grow, 2.0, (80, 80)))
        assert len(moved) == kept


def test_objects_are_cut_at_the_edges():
    objects = aug.Objects.joined([outlined([[(-5, 3), (30, 3), (30, 40)]], label=7), plain((1, 2, 2, 9, 50))])
    cut = aug.clip_objects(objects, (20, 10))
    np.testing.assert_array_equal(cut.boxes, boxes((7, 0, 3, 20, 10), (1, 2, 2, 9, 10)))
    np.testing.assert_array_equal(cut.polygon(0), [(0, 3), (20, 3), (20, 10)])
    assert len(cut.polygon(1)) == 0 and objects.boxes[0, 1] == -5


# mixup, colour, flips


def test_mixup():
    a, b = np.full((4, 4, 3), 200, np.uint8), np.full((4, 4, 3), 100, np.uint8)
    image, rows = aug.mixup(a, boxes((0, 1, 1, 2, 2)), b, boxes((1, 0, 0, 3, 3)), 0.25)
    assert (image == 125).all() and rows[:, 0].tolist() == [0, 1]
    weights = np.array([aug.draw_mixup(np.random.default_rng(i)) for i in range(500)])
    assert abs(weights.mean() - 0.5) < 0.01
    assert abs(weights.std() - math.sqrt(1 / (4 * 65))) < 0.006  # of beta(32, 32)


def test_colour_gains():
    image = noise(16, 16)
    assert aug.hsv(image, aug.ColourGains(1.0, 1.0, 1.0)) is image
    red = np.zeros((1, 1, 3), np.uint8)
    red[0, 0, 2] = 200
    assert aug.hsv(red, aug.ColourGains(1.0, 1.0, 0.5))[0, 0].tolist() == [0, 0, 100]
    assert aug.hsv(red, aug.ColourGains(1.0, 0.0, 1.0))[0, 0].tolist() == [200, 200, 200]
    green = np.zeros((1, 1, 3), np.uint8)
    green[0, 0, 1] = 200  # hue 60 of 180
    assert aug.hsv(green, aug.ColourGains(2.0, 1.0, 1.0))[0, 0].tolist() == [200, 0, 0]  # 120: blue
    blue = np.array([[[200, 0, 0]]], np.uint8)
    assert aug.hsv(blue, aug.ColourGains(2.5, 1.0, 1.0))[0, 0].tolist() == [200, 0, 0]  # 120 · 2.5 = 300 = 120
    assert aug.hsv(green, aug.ColourGains(3.0, 1.0, 2.0))[0, 0].tolist() == [0, 0, 255]  # 180 = 0: red, clipped


def test_colour_ranges():
    rng = np.random.default_rng(0)
    drawn = np.array(
        [[g.hue, g.saturation, g.value] for g in (aug.draw_colour(rng, Hyperparameters()) for _ in range(400))]
    )
    np.testing.assert_allclose(drawn.min(0), [0.985, 0.3, 0.6], atol=0.01)
    np.testing.assert_allclose(drawn.max(0), [1.015, 1.7, 1.4], atol=0.01)


@pytest.mark.parametrize(
    ("flips", "box"),
    [
        ((False, False), (5, 6, 20, 16)),
        ((True, False), (5, 14, 20, 24)),
        ((False, True), (30, 6, 45, 16)),
        ((True, True), (30, 14, 45, 24)),
    ],
)
def test_flips(flips, box):
    image = np.zeros((30, 50, 3), np.uint8)
    image[6:16, 5:20] = 255
    out, rows = aug.flip(image, boxes((3, 5, 6, 20, 16)), aug.Flips(*flips))
    np.testing.assert_array_equal(rows, boxes((3, *box)))
    x1, y1, x2, y2 = box
    assert (out[y1:y2, x1:x2] == 255).all() and (out == 255).sum() == (image == 255).sum()


def test_flip_probabilities():
    rng = np.random.default_rng(0)
    drawn = [aug.draw_flips(rng, replace(Hyperparameters(), flipud=0.0, fliplr=0.25)) for _ in range(400)]
    assert not any(f.up_down for f in drawn) and 70 < sum(f.left_right for f in drawn) < 130


def test_opencv_turns_the_same_way():
    """The rotation is the one of `cv2.getRotationMatrix2D`, which YOLOv5's `degrees` means."""
    hyp = replace(STILL, degrees=30.0, scale=0.2)
    p = aug.draw_perspective(np.random.default_rng(1), hyp, (60, 80))
    angle = math.degrees(math.atan2(p.matrix[0, 1], p.matrix[0, 0]))
    np.testing.assert_allclose(p.matrix[:2], cv2.getRotationMatrix2D((40, 30), angle, p.scale), atol=1e-9)
    assert abs(angle) <= 30
