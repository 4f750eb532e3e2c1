"""Validation from end to end, with a stand-in model whose detections are known."""

import numpy as np
import pytest
import torch
from reference import SHARED, load_json, needs_shared

import val
from models.yolo import load_model
from utils import UserError
from utils.config import Hyperparameters, load_data_config
from utils.dataloaders import Batch, DetectionDataset, create_loader, load_split
from utils.options import ValOptions
from val import evaluate

CPU = torch.device("cpu")


class Oracle(torch.nn.Module):
    """Finds exactly the objects it was told, an image after the other; classes rotate by `shift`."""

    names = ("cat", "dog", "bird")
    nc = 3
    stride = torch.tensor([8.0, 16, 32])

    def __init__(self, targets, shift=0):
        super().__init__()
        self.targets, self.shift, self.modes = targets, shift, []

    def forward(self, images):
        self.modes.append(self.training)
        assert images.dtype == torch.float32
        assert 0 <= images.min() <= images.max() <= 1
        return [images]

    def decode(self, raw):
        batch, _, height, width = raw[0].shape
        found = torch.zeros(batch, 8, 8)
        for row, (image, number, *box) in enumerate(self.targets.tolist()):
            slot = found[int(image), row]
            slot[:4] = torch.tensor(box) * torch.tensor([width, height, width, height])
            slot[4] = 1
            slot[5 + (int(number) + self.shift) % 3] = 0.9 - 0.01 * row
        return found


TARGETS = torch.tensor(
    [
        [0, 0, 0.3, 0.5, 0.2, 0.3],
        [0, 1, 0.7, 0.5, 0.3, 0.2],
        [1, 0, 0.5, 0.5, 0.4, 0.4],
    ]
)


def batch():
    # 128x192 pictures (height, width) shrunk to half, with 16 px above and below: inputs of 96x96
    place = ((128, 192), ((0.5, 0.5), (0.0, 16.0)))
    images = torch.full((2, 3, 96, 96), 120, dtype=torch.uint8)
    return Batch(images, TARGETS.clone(), ["a.jpg", "b.jpg"], [place, place])


def test_a_perfect_detector():
    model = Oracle(TARGETS).train()
    metrics = evaluate(model, [batch()], device=CPU, progress=False)
    assert (metrics.map50, metrics.map50_95) == (pytest.approx(0.995), pytest.approx(0.995))
    assert (metrics.precision, metrics.recall) == (1, 1)
    assert metrics.classes.tolist() == [0, 1]
    assert metrics.class_instances.tolist() == [2, 1]
    assert metrics.class_images.tolist() == [2, 1]
    assert metrics.confusion.matrix.tolist() == np.diag([2, 1, 0, 0]).tolist()
    assert metrics.images == 2
    assert all(milliseconds >= 0 for milliseconds in metrics.speed)
    assert model.modes == [False]  # evaluated in evaluation mode …
    assert model.training  # … and given back as it was


def test_wrong_classes_score_nothing_unless_classes_are_one():
    wrong = evaluate(Oracle(TARGETS, shift=1), [batch()], device=CPU, progress=False)
    assert wrong.map50 == 0
    one = evaluate(Oracle(TARGETS, shift=1), [batch()], device=CPU, progress=False, single_cls=True)
    assert one.map50 == pytest.approx(0.995)
    assert one.names == ("item",)
    assert one.class_instances.tolist() == [3]


def test_a_box_may_count_for_two_classes():
    class Doubtful(Oracle):
        def decode(self, raw):
            found = super().decode(raw)
            found[0, 0, 6] = 0.95  # the first object, class 0, is a bit more of class 1
            return found

    metrics = evaluate(Doubtful(TARGETS), [batch()], device=CPU, progress=False)
    assert metrics.class_ap50[0] == pytest.approx(0.995)
    assert metrics.class_ap50[1] == pytest.approx(0.4975)  # a false alarm comes before its one object


def test_a_shift_costs_the_strict_thresholds_only():
    moved = TARGETS.clone()
    moved[:, 2] += 0.02
    metrics = evaluate(Oracle(moved), [batch()], device=CPU, progress=False)
    assert metrics.map50 == pytest.approx(0.995)
    # It leaves an IoU of (w - 0.02) / (w + 0.02). Class 1: 0.875, so 8 thresholds of 10. Class 0: 0.82 and the less
    # sure one 0.905; beyond 0.80 that one is found alone, second in order, for two more thresholds.
    half_right = 0.5 * 0.5 + 0.5 * 0.5 / 2
    assert metrics.class_ap[1] == pytest.approx(0.8 * 0.995)
    assert metrics.class_ap[0] == pytest.approx((7 * 0.995 + 2 * half_right) / 10, abs=0.003)


def test_boxes_are_cut_to_the_original_picture():
    # Upwards, the detection reaches over the border (16 px of 96) that the letterbox put there.
    true = torch.tensor([[0, 0, 0.5, (16 + 64) / 2 / 96, 0.5, 48 / 96]])
    beyond = torch.tensor([[0, 0, 0.5, (0 + 64) / 2 / 96, 0.5, 64 / 96]])
    given = batch()._replace(targets=true)
    metrics = evaluate(Oracle(beyond), [given], device=CPU, progress=False)
    assert metrics.map50_95 == pytest.approx(0.995)


def test_the_loss_is_averaged_over_the_batches():
    values = iter([torch.tensor([1.0, 2, 3]), torch.tensor([3.0, 2, 1])])
    metrics = evaluate(
        Oracle(TARGETS),
        [batch(), batch()],
        device=CPU,
        progress=False,
        criterion=lambda raw, targets: (torch.tensor(0.0), next(values)),
    )
    assert metrics.loss == (2, 2, 2)


def test_the_mode_is_given_back_after_an_error_too():
    model = Oracle(TARGETS).train()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, [batch()], device=CPU, progress=False, criterion=lambda *_: 1 / 0)
    assert model.training


def test_pictures_are_written_where_asked_for(tmp_path):
    evaluate(Oracle(TARGETS), [batch()] * 4, device=CPU, save_dir=tmp_path, progress=False)
    curves = [f"{name}_curve.png" for name in ("F1", "P", "PR", "R")]
    batches = [f"val_batch{i}_{kind}.jpg" for i in range(3) for kind in ("labels", "pred")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*curves, "confusion_matrix.png", *batches])


def data_set(tmp_path, names="[cat, dog, bird]", label="0 0.5 0.5 0.5 0.5\n"):
    import cv2

    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    cv2.imwrite(str(tmp_path / "images" / "a.png"), np.full((64, 64, 3), 90, np.uint8))
    (tmp_path / "labels" / "a.txt").write_text(label, encoding="utf-8")
    (tmp_path / "d.yaml").write_text(f"val: images\nnames: {names}\n", encoding="utf-8")
    return ValOptions(
        data=str(tmp_path / "d.yaml"), weights="w.pt", imgsz=64, workers=0, device="cpu", project=str(tmp_path / "runs")
    )


@pytest.fixture
def oracle(monkeypatch):
    found = torch.tensor([[0, 0, 0.5, 0.5, 0.5 * 64 / 96, 0.5 * 64 / 96]])  # a border of half a stride on each side
    monkeypatch.setattr("models.yolo.load_model", lambda *_, **__: Oracle(found))


def test_the_script_prints_table_speed_and_folder(tmp_path, oracle, capsys):
    metrics = val.main(data_set(tmp_path))
    assert metrics.map50 == pytest.approx(0.995)
    lines = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.split()[:3] == ["Class", "Images", "Instances"])
    assert lines[table + 1].split() == ["all", "1", "1", "1", "1", "0.995", "0.995"]
    assert lines[table + 2].split()[0] == "cat"
    assert "inference" in lines[-2]
    assert lines[-2].endswith("per image at shape (32, 3, 64, 64)")
    assert lines[-1] == f"Results saved to {tmp_path / 'runs' / 'exp'}"
    assert (tmp_path / "runs" / "exp" / "PR_curve.png").is_file()


def test_the_script_says_when_there_are_no_labels(tmp_path, oracle, capsys):
    val.main(data_set(tmp_path, label=""))
    assert "no labels in the val split" in capsys.readouterr().out


def test_the_script_refuses_a_data_set_with_other_classes(tmp_path, oracle):
    with pytest.raises(UserError, match=r"w\.pt detects 3 classes but .* names 2"):
        val.main(data_set(tmp_path, names="[cat, dog]"))


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("split", ["val2017", "train2017"])
def test_coco128_is_measured_as_by_yolov5(split):
    """Overall figures of yolov5n; the reference has three decimals, so the comparison has too."""
    data = load_data_config(SHARED / "data" / "coco128.yaml")
    labels = load_split(data, split.removesuffix("2017"), cache=False)
    dataset = DetectionDataset(labels, 640, hyp=Hyperparameters(), rect=True, batch_size=16, pad=0.5)
    loader = create_loader(dataset, batch_size=16, workers=0, shuffle=False, seed=0)
    metrics = evaluate(load_model(SHARED / "weights" / "yolov5n.pt"), loader, device=CPU)
    wanted = load_json(SHARED / "reference" / "val_coco128.json")["per_class"][split]["all"]
    assert metrics.images == wanted["images"] and metrics.instances == wanted["instances"]
    for name, tolerance in (("map50", 3), ("map50_95", 3), ("precision", 10), ("recall", 10)):
        thousandths = round(getattr(metrics, name) * 1000) - round(wanted[name] * 1000)
        assert abs(thousandths) <= tolerance, (name, getattr(metrics, name), wanted[name])
