"""Pictures: that they are written, show what they should, and touch nothing global."""

import subprocess
import sys
import warnings

import cv2
import numpy as np
import pytest
import torch

from utils import ROOT
from utils.metrics import MetricsCollector
from utils.plots import (
    RESULT_COLUMNS,
    PlotError,
    class_colour,
    draw_boxes,
    plot_batch,
    plot_confidence_curves,
    plot_confusion_matrix,
    plot_labels,
    plot_pr_curve,
    plot_results,
    read_results,
    write_image,
)

RED = (0, 0, 255)


def size_of(path):
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    assert image.std() > 5, f"{path.name} is blank"
    return image.shape[:2]


def metrics_of(nc):
    rng = np.random.default_rng(nc)
    collector = MetricsCollector(tuple(rf"$\frac{i}$" if i else "_hidden" for i in range(nc)))
    for _ in range(60):
        corner = rng.uniform(0, 400, (5, 2))
        boxes = np.concatenate((corner, corner + rng.uniform(30, 90, (5, 2))), 1)
        classes = rng.integers(0, nc, 5)
        found = np.column_stack((boxes + rng.normal(0, 4, (5, 4)), rng.random(5), classes))
        collector.update(torch.tensor(found).float(), torch.tensor(np.column_stack((classes, boxes))).float())
    return collector.result()


def test_colours_differ_and_stay():
    colours = [class_colour(i) for i in range(80)]
    assert len(set(colours)) == 80
    assert all(0 <= value <= 255 for colour in colours for value in colour)
    neighbours = np.abs(np.diff(np.array(colours), axis=0)).sum(axis=1)
    assert neighbours.min() > 90


def test_write_image_below_a_folder_with_any_name(tmp_path):
    folder = tmp_path / "übung 图"
    folder.mkdir()
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    path = write_image(folder / "ä.png", image)
    assert np.array_equal(cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR), image)


def test_write_image_falls_back_to_jpeg(tmp_path):
    assert write_image(tmp_path / "a.unknown", np.zeros((8, 8, 3), np.uint8)) == tmp_path / "a.jpg"
    assert (tmp_path / "a.jpg").read_bytes()[:2] == b"\xff\xd8"


def test_write_image_names_the_place_it_cannot_write(tmp_path):
    with pytest.raises(PlotError, match=r"missing.*cannot be written"):
        write_image(tmp_path / "missing" / "a.png", np.zeros((8, 8, 3), np.uint8))


def test_draw_boxes_draws_the_frame_and_leaves_the_rest():
    image = np.zeros((100, 120, 3), np.uint8)
    drawn = draw_boxes(image, [(30.4, 40, 80, 90)], [""], [RED], line_thickness=1)
    assert not image.any()
    assert drawn[40, 55].tolist() == drawn[65, 30].tolist() == [0, 0, 255]
    assert not drawn[45:85, 35:75].any()
    assert not drawn[:36].any()


@pytest.mark.parametrize("text", ["person 0.9", "человек 0.9"])
def test_a_label_stands_above_its_box_or_inside_and_within_the_picture(text):
    def filled(box, shape=(120, 300)):
        drawn = draw_boxes(np.zeros((*shape, 3), np.uint8), [box], [text], [RED], line_thickness=2)
        rows, columns = np.nonzero((drawn == RED).all(axis=2))
        return drawn, rows.min(), columns.max()

    drawn, top, _ = filled((50, 60, 250, 100))
    assert 30 < top < 50  # above
    assert (drawn[top:58] > 150).all(axis=2).any()  # with white writing on it
    drawn, top, _ = filled((50, 3, 250, 100))
    assert 0 <= top <= 3
    assert (drawn[8:14, 60:80] == RED).all(axis=2).any()  # no room above: inside
    at_edge = draw_boxes(np.zeros((120, 300, 3), np.uint8), [(280, 60, 295, 100)], [text], [RED], line_thickness=2)
    row = (at_edge[45] == RED).all(axis=1)
    assert row.nonzero()[0].min() < 240  # moved to the left rather than cut off


def test_draw_boxes_without_boxes_is_a_copy():
    image = np.full((10, 10, 3), 7, np.uint8)
    drawn = draw_boxes(image, np.zeros((0, 4)), [], [])
    assert np.array_equal(drawn, image)
    assert drawn is not image


def test_plot_batch_puts_labels_where_they_are(tmp_path):
    images = torch.zeros(3, 3, 64, 96, dtype=torch.uint8)
    images[1, 0] = 200  # red
    targets = torch.tensor([[1, 0, 0.5, 0.5, 0.5, 0.5]])
    plot_batch(images, targets, [""], tmp_path / "grid.png", max_size=192)
    grid = cv2.imread(str(tmp_path / "grid.png"))
    assert grid.shape == (128, 192, 3)  # two rows of two
    colour = list(class_colour(0))
    assert grid[16, 96 + 48].tolist() == colour  # upper edge of the box in the second picture
    assert grid[32, 96 + 48].tolist() == [0, 0, 200]
    assert grid[16, 48].tolist() == [0, 0, 0]
    assert (grid[70:, 100:] == 255).all()  # the fourth place stays free


def test_plot_batch_shows_sure_detections_only(tmp_path):
    detections = [torch.tensor([[10, 10, 50, 50, 0.9, 0], [60, 10, 90, 50, 0.2, 0.0]])]
    plot_batch(torch.zeros(1, 3, 64, 96), detections, ["x"], tmp_path / "grid.png", max_size=96)
    grid = cv2.imread(str(tmp_path / "grid.png"))
    assert grid[50, 30].any()
    assert not grid[50, 75].any()


def test_plot_batch_enlarges_small_pictures(tmp_path):
    plot_batch(torch.zeros(4, 3, 128, 128), torch.zeros(0, 6), ["x"], tmp_path / "grid.jpg")
    assert size_of(tmp_path / "grid.jpg") == (800, 800)


def test_plot_batch_scales_down_and_cuts_off(tmp_path):
    images = torch.randint(0, 255, (20, 3, 160, 160), dtype=torch.uint8)
    plot_batch(images, torch.zeros(0, 6), ["x"], tmp_path / "grid.jpg", paths=["a.jpg"] * 20, max_size=320)
    assert size_of(tmp_path / "grid.jpg") == (320, 320)
    box = torch.tensor([[0, 0, 0.5, 0.5, 0.5, 0.5]])
    plot_batch(torch.zeros(1, 3, 160, 160), box, [""], tmp_path / "one.png", max_size=80)
    assert cv2.imread(str(tmp_path / "one.png"))[20, 40].tolist() == list(class_colour(0))


@pytest.mark.parametrize("nc", [1, 3, 80])
def test_curves_and_matrix_for_few_and_many_classes(tmp_path, nc):
    metrics = metrics_of(nc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_pr_curve(metrics, tmp_path / "PR_curve.png")
        plot_confidence_curves(metrics, tmp_path)
        plot_confusion_matrix(metrics.confusion.matrix, metrics.names, tmp_path / "confusion_matrix.png")
    for name in ("PR_curve", "P_curve", "R_curve", "F1_curve", "confusion_matrix"):
        assert min(size_of(tmp_path / f"{name}.png")) > 500


def test_curves_of_nothing(tmp_path):
    metrics = MetricsCollector(("a", "b")).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_pr_curve(metrics, tmp_path / "PR_curve.png")
        plot_confidence_curves(metrics, tmp_path)
        plot_confusion_matrix(metrics.confusion.matrix, metrics.names, tmp_path / "confusion_matrix.png")
        plot_labels(np.zeros((0, 5)), metrics.names, tmp_path / "labels.jpg")
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("nc", [1, 80])
def test_label_statistics(tmp_path, nc):
    rng = np.random.default_rng(0)
    boxes = np.column_stack((rng.integers(0, nc, 2000), rng.random((2000, 4))))
    plot_labels(boxes, [f"class {i}" for i in range(nc)], tmp_path / "labels.jpg")
    assert min(size_of(tmp_path / "labels.jpg")) > 500


def results_csv(path, rows):
    header = ["epoch", *RESULT_COLUMNS[:5], "metrics/mAP_0.5", "metrics/mAP_0.5:0.95", *RESULT_COLUMNS[5:8], "x/lr0"]
    lines = [",".join(f"{name:>20}" for name in header)]
    lines += [",".join(f"{value:>20.5g}" for value in (epoch, *np.linspace(0.1, 0.9, 11))) for epoch in range(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_results_are_drawn_beside_their_csv(tmp_path):
    for rows in (1, 30):
        picture = plot_results(results_csv(tmp_path / "results.csv", rows))
        assert picture == tmp_path / "results.png"
        assert min(size_of(picture)) > 500


def test_results_with_a_row_cut_off_and_a_missing_number(tmp_path):
    path = results_csv(tmp_path / "results.csv", 3)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2].replace("0.9", "   ", 1)
    path.write_text("\n".join(lines) + "\n                   3,   0.1", encoding="utf-8")
    columns = read_results(path)
    assert columns["epoch"].tolist() == [0, 1, 2]
    assert np.isnan(columns["x/lr0"]).tolist() == [False, True, False]
    plot_results(path)


@pytest.mark.parametrize(
    ("text", "words"), [("", "no epoch"), ("epoch,train/box_loss\n0,1\n", "no column 'train/obj_loss'")]
)
def test_results_that_cannot_be_drawn(tmp_path, text, words):
    (tmp_path / "results.csv").write_text(text, encoding="utf-8")
    with pytest.raises(PlotError, match=words):
        plot_results(tmp_path / "results.csv")
    with pytest.raises(PlotError, match="cannot be read"):
        plot_results(tmp_path / "none.csv")


def test_pyplot_stays_out():
    code = """
import sys, numpy, tempfile, pathlib
import utils.plots as plots
assert "matplotlib" not in sys.modules, "imported at start"
with tempfile.TemporaryDirectory() as folder:
    plots.plot_labels(numpy.full((1, 5), 0.5) * [0, 1, 1, 1, 1], ["a"], pathlib.Path(folder) / "a.png")
assert "matplotlib.figure" in sys.modules
assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps global state"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
