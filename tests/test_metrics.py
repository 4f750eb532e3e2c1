"""Matching, average precision, confusion matrix and the table, on values that can be checked by hand."""

import json

import numpy as np
import pytest
import torch

from utils import ROOT
from utils.metrics import (
    IOU_THRESHOLDS,
    ConfusionMatrix,
    MetricsCollector,
    StageTimer,
    ap_per_class,
    average_precision,
    match_predictions,
)

REFERENCE = ROOT.parent / "shared" / "reference"

LABEL = [0, 0, 0, 10, 10]  # class 0, a square of 10 px


def strip(height, conf, cls=0):
    """A detection whose IoU with LABEL is height / 10."""
    return [0, 0, 10, height, conf, cls]


def matched(detections, labels):
    return match_predictions(torch.tensor(detections, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32))


def test_thresholds_run_from_half_to_095():
    assert np.allclose(IOU_THRESHOLDS, [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])


def test_a_detection_counts_up_to_its_iou():
    assert matched([strip(6.2, 0.9)], [LABEL]).tolist() == [[True] * 3 + [False] * 7]


def test_an_iou_of_exactly_the_threshold_counts():
    assert matched([strip(5, 0.9), strip(7.5, 0.8)], [LABEL])[0, 0]
    assert matched([strip(7.5, 0.8)], [LABEL])[0, 5]


def test_the_surer_detection_takes_the_label_though_its_iou_is_lower():
    result = matched([strip(9.2, 0.8), strip(6.2, 0.9)], [LABEL])
    assert result[:, 0].tolist() == [False, True]  # at 0.50 both reach the label
    assert result[:, 6].tolist() == [True, False]  # at 0.80 only the other one does


def test_a_second_detection_takes_the_label_that_is_left():
    # Both detections lie best on the first label; the second one reaches the other label too (IoU 0.6).
    labels = [LABEL, [0, 0, 2.5, 10, 12.5]]
    assert matched([strip(10, 0.9), strip(10, 0.8)], labels)[:, 0].tolist() == [True, True]
    assert matched([strip(10, 0.9), strip(10, 0.8)], labels)[:, 3].tolist() == [True, False]


def test_classes_must_agree():
    assert not matched([strip(10, 0.9, cls=1)], [LABEL]).any()


@pytest.mark.parametrize(("detections", "labels"), [([], [LABEL]), ([strip(10, 0.9)], []), ([], [])])
def test_nothing_matches_nothing(detections, labels):
    result = match_predictions(torch.tensor(detections).reshape(-1, 6), torch.tensor(labels).reshape(-1, 5))
    assert result.shape == (len(detections), 10)
    assert not result.any()


def greedy(detections, labels, threshold):
    """COCO's rule as one reads it, a threshold and a pair at a time."""

    def iou(a, b):
        w = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
        h = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
        return w * h / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h)

    right, taken = [False] * len(detections), set()
    for d in sorted(range(len(detections)), key=lambda i: -detections[i][4]):
        best, best_iou = None, threshold
        for t, label in enumerate(labels):
            overlap = iou(detections[d][:4], label[1:])
            if t not in taken and label[0] == detections[d][5] and overlap >= best_iou:
                best, best_iou = t, overlap
        if best is not None:
            taken.add(best)
            right[d] = True
    return right


def test_matching_equals_the_rule_written_out():
    rng = np.random.default_rng(3)
    matches = 0
    for _ in range(60):
        corner, size = rng.uniform(0, 15, (8, 2)), rng.uniform(10, 25, (8, 2))
        labels = np.column_stack((rng.integers(0, 2, 8), corner, corner + size))
        near = labels[rng.integers(0, 8, 20)]
        boxes = near[:, 1:] + rng.normal(0, 1.5, (20, 4))
        detections = np.column_stack((boxes, rng.random(20), near[:, 0])).astype(np.float32)
        result = match_predictions(detections, labels)
        for column, threshold in enumerate(IOU_THRESHOLDS):
            assert result[:, column].tolist() == greedy(detections.tolist(), labels.tolist(), threshold)
        matches += result.sum()
    assert matches > 1000


def test_average_precision_of_simple_curves():
    # The curve falls from the last recall to (1, 0), and its end counts: a perfect one has 0.995.
    assert average_precision(np.array([1.0]), np.array([1.0]))[0] == pytest.approx(0.995)
    assert average_precision(np.array([0.5]), np.array([1.0]))[0] == pytest.approx(0.75)
    # It starts at precision 1 with recall 0, whatever comes.
    assert average_precision(np.array([1.0]), np.array([0.5]))[0] == pytest.approx(0.75, abs=0.003)
    # A later, higher precision lifts all before it.
    area, envelope, recalls = average_precision(np.array([0.5, 0.5, 0.75]), np.array([1.0, 0.5, 0.6]))
    assert envelope.tolist() == [1, 1, 0.6, 0.6, 0]
    assert recalls.tolist() == [0, 0.5, 0.5, 0.75, 1]
    assert area == pytest.approx(0.5 * 1 + 0.25 * 0.6 + 0.25 * 0.6 / 2, abs=0.003)


def ten(column):
    return np.repeat(np.array(column, dtype=bool)[:, None], 10, axis=1)


def test_per_class_figures_by_hand():
    # Class 2: two labels, found with 0.9 and 0.7, a wrong one between. Class 5: one label, never found.
    found = ap_per_class(ten([1, 0, 1]), np.array([0.9, 0.8, 0.7]), np.array([2, 2, 2]), np.array([2, 5, 2]))
    assert found.classes.tolist() == [2, 5]
    assert found.ap[1].tolist() == [0] * 10
    assert found.ap[0, 0] == pytest.approx(0.5 + 0.5 * 2 / 3, abs=0.01)
    assert (found.recall[1], found.precision[1], found.f1[1]) == (0, 0, 0)
    # Below 0.7 all three count: P 2/3, R 1.
    assert found.curves.precision[0, 100] == pytest.approx(2 / 3)
    assert found.curves.recall[0, 100] == 1
    assert found.curves.f1[0, 100] == pytest.approx(0.8)
    # Above the surest detection nothing is found.
    assert (found.curves.precision[0, 950], found.curves.recall[0, 950]) == (1, 0)
    assert (found.tp[0], found.fp[0]) == (2, 1)


def test_the_operating_point_is_no_narrow_peak():
    # Ten labels: nine found above 0.900, then ten false alarms from 0.895 to 0.890, then the last label at 0.5.
    conf = np.concatenate((np.linspace(0.91, 0.90, 9), np.linspace(0.895, 0.89, 10), [0.5]))
    found = ap_per_class(ten([1] * 9 + [0] * 10 + [1]), conf, np.zeros(20), np.zeros(10))
    f1 = found.curves.f1[0]
    assert f1.max() > 0.9  # just above 0.895
    assert found.f1[0] == pytest.approx(2 * 0.5 / 1.5)  # P 0.5, R 1 on the broad plateau below 0.5
    assert found.confidence < 0.5


def test_detections_of_classes_without_labels_do_not_count():
    alone = ap_per_class(ten([1, 0]), np.array([0.9, 0.8]), np.array([0, 0]), np.array([0]))
    beside = ap_per_class(ten([1, 0, 0]), np.array([0.9, 0.8, 0.99]), np.array([0, 0, 7]), np.array([0]))
    assert beside.classes.tolist() == [0]
    assert np.array_equal(alone.ap, beside.ap)
    assert alone.confidence == beside.confidence


def test_order_of_detections_does_not_matter():
    rng = np.random.default_rng(0)
    tp, conf, cls = rng.random((200, 10)) < 0.5, rng.permutation(200) / 200, rng.integers(0, 4, 200)
    target = rng.integers(0, 4, 300)
    order = rng.permutation(200)
    one, other = ap_per_class(tp, conf, cls, target), ap_per_class(tp[order], conf[order], cls[order], target)
    for name in ("ap", "precision", "recall", "f1", "tp", "fp"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert (one.ap > 0).all()


def test_no_labels_and_no_detections():
    empty = np.zeros((0, 10), bool), np.zeros(0), np.zeros(0)
    assert ap_per_class(*empty, np.zeros(0)).ap.shape == (0, 10)
    unfound = ap_per_class(*empty, np.array([1, 1]))
    assert (unfound.classes.tolist(), unfound.ap.sum(), unfound.recall.tolist()) == ([1], 0, [0])


@pytest.mark.skipif(not (REFERENCE / "peer_0.npz").is_file(), reason="../shared/reference is not there")
def test_average_precision_equals_yolov5():
    expected = json.loads((REFERENCE / "peer_0.json").read_text(encoding="utf-8"))["ap"]
    with np.load(REFERENCE / "peer_0.npz") as arrays:
        given = [arrays[f"ap/{name}"] for name in ("tp", "conf", "pred_cls", "target_cls")]
    found = ap_per_class(*given)
    for name, ours in (("ap", found.ap), ("p", found.precision), ("r", found.recall), ("f1", found.f1)):
        assert np.abs(ours - np.array(expected[name])).max() < 1e-9, name
    assert found.tp.tolist() == expected["tp"]
    assert found.fp.tolist() == expected["fp"]
    assert found.classes.tolist() == expected["classes"]


def test_confusion_matrix_by_hand():
    matrix = ConfusionMatrix(2)
    labels = torch.tensor([[0, 0, 0, 10, 10], [1, 20, 0, 30, 10], [1, 40, 0, 50, 10]])
    detections = torch.tensor(
        [
            [0, 0, 10, 10, 0.9, 0],  # right
            [0, 0, 10, 9, 0.95, 1],  # the same label, a lower IoU: left over, so background
            [20, 0, 30, 8, 0.8, 0],  # the place is right, the class is not
            [40, 0, 50, 10, 0.25, 1],  # not above the confidence threshold: its label is missed
        ]
    )
    matrix.update(detections, labels)
    assert matrix.matrix.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]


def test_confusion_matrix_counts_images_without_labels_or_detections():
    matrix = ConfusionMatrix(2)
    matrix.update(torch.tensor([[0, 0, 10, 10, 0.9, 1]]), torch.zeros(0, 5))
    matrix.update(None, torch.tensor([[0, 0, 0, 10, 10.0]]))
    assert matrix.matrix.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0]]


def test_confusion_matrix_counts_each_box_once():
    rng = np.random.default_rng(1)
    corner = rng.uniform(0, 30, (40, 2))
    labels = np.column_stack((rng.integers(0, 3, 40), corner, corner + 20)).astype(np.float32)
    boxes = labels[rng.integers(0, 40, 60), 1:] + rng.normal(0, 2, (60, 4))
    detections = np.column_stack((boxes, rng.uniform(0.3, 1, 60), rng.integers(0, 3, 60))).astype(np.float32)
    matrix = ConfusionMatrix(3)
    matrix.update(detections, labels)
    assert matrix.matrix[:, :3].sum(axis=0).tolist() == np.bincount(labels[:, 0].astype(int)).tolist()
    assert matrix.matrix[:3].sum(axis=1).tolist() == np.bincount(detections[:, 5].astype(int)).tolist()
    assert matrix.matrix[:3, :3].sum() > 10


def collected():
    collector = MetricsCollector(("cat", "dog", "bird"))
    collector.update(torch.tensor([strip(10, 0.9)]), torch.tensor([LABEL, [2, 50, 50, 60, 60.0]]))
    collector.update(torch.zeros(0, 6), torch.tensor([[2, 0, 0, 5, 5.0], [2, 9, 9, 20, 20]]))
    collector.update(torch.tensor([strip(10, 0.4, cls=1)]), torch.zeros(0, 5))
    return collector.result(loss=(0.1, 0.2, 0.3), speed=(1, 2, 3))


def test_metrics_of_three_images():
    metrics = collected()
    assert (metrics.images, metrics.instances) == (3, 4)
    assert metrics.classes.tolist() == [0, 2]
    assert metrics.class_instances.tolist() == [1, 3]
    assert metrics.class_images.tolist() == [1, 2]
    assert metrics.class_ap50 == pytest.approx([0.995, 0])
    assert metrics.map50 == pytest.approx(0.4975)
    assert metrics.map50_95 == pytest.approx(0.4975)
    assert metrics.confusion.matrix.sum() == 5
    assert metrics.loss == (0.1, 0.2, 0.3)


def test_fitness_weighs_the_two_maps():
    class Half:
        map50, map50_95 = 0.5, 0.25

    assert type(collected()).fitness.fget(Half()) == pytest.approx(0.1 * 0.5 + 0.9 * 0.25)


def test_table_has_a_row_for_each_class_with_labels():
    lines = collected().table().splitlines()
    assert lines[0].split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert [line.split()[0] for line in lines[1:]] == ["all", "cat", "bird"]
    assert lines[1].split()[1:3] == ["3", "4"]
    assert lines[2].split()[5:] == ["0.995", "0.995"]
    assert {len(line) for line in lines} == {22 + 6 * 11}
    assert len(collected().table(per_class=False, header=False).splitlines()) == 1


def test_nothing_at_all_gives_zeros():
    metrics = MetricsCollector(("cat",)).result()
    assert (metrics.precision, metrics.recall, metrics.map50, metrics.map50_95, metrics.fitness) == (0, 0, 0, 0, 0)
    assert metrics.table().splitlines()[1].split() == ["all", "0", "0", "0", "0", "0", "0"]


def test_stage_timer_adds_up(monkeypatch):
    ticks = iter([0.0, 1.0, 5.0, 5.5, 7.0, 8.0])
    monkeypatch.setattr("utils.metrics.time.perf_counter", lambda: next(ticks))
    timer = StageTimer(2, torch.device("cpu"))
    for stage in (0, 1, 0):
        with timer.measure(stage):
            pass
    assert timer.seconds == [2.0, 0.5]
    assert timer.last == 1.0
    assert timer.milliseconds(4) == (500.0, 125.0)
