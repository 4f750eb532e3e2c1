"""The data path: values of validation samples, and training samples as a function of (seed, epoch, index)."""

import hashlib
import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from utils import ROOT
from utils.config import DataConfig, Hyperparameters
from utils.dataloaders import (
    Batch,
    DetectionDataset,
    EpochSampler,
    batch_shapes,
    collate,
    create_loader,
    load_split,
)
from utils.labels import LabelError, LabelSet, find_images, load_labels, read_image

BCCD = ROOT.parent / "shared" / "data" / "bccd"
ALL_ON = replace(
    Hyperparameters(),
    mosaic=0.7,
    mixup=0.5,
    copy_paste=0.5,
    degrees=10.0,
    shear=3.0,
    perspective=0.0005,
    flipud=0.5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Nine pictures of different shapes with a bright rectangle each; the odd ones have it as a polygon."""
    root = tmp_path_factory.mktemp("set")
    (root / "images").mkdir()
    (root / "labels").mkdir()
    rng = np.random.default_rng(0)
    for i in range(9):
        height, width = int(rng.integers(40, 140)), int(rng.integers(40, 140))
        image = rng.integers(0, 60, (height, width, 3), np.uint8)
        x1, y1, x2, y2 = width // 4, height // 4, width // 4 + 20, height // 4 + 16
        image[y1:y2, x1:x2] = (255, 128 + i, 0)
        suffix = "jpg" if i % 3 == 0 else "png"
        cv2.imwrite(str(root / f"images/{i}.{suffix}"), image)
        corners = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]]) / (width, height)
        centre, size = corners.mean(0), corners[2] - corners[0]
        values = corners.ravel() if i % 2 else np.concatenate((centre, size))
        (root / f"labels/{i}.txt").write_text(" ".join(map(str, [i % 3, *values])))
    return root


@pytest.fixture(scope="module")
def labels(folder) -> LabelSet:
    return load_labels(find_images([folder / "images"]), 3, cache=None, progress=False)


def training(labels: LabelSet, **options) -> DetectionDataset:
    return DetectionDataset(labels, 64, **{"hyp": ALL_ON, "seed": 3, "augment": True, **options})


def digest(batches: list[Batch]) -> str:
    whole = hashlib.sha256()
    for batch in batches:
        whole.update(batch.images.numpy().tobytes() + batch.targets.numpy().tobytes() + "".join(batch.paths).encode())
    return whole.hexdigest()


def epoch_digest(loader, epoch: int) -> str:
    loader.sampler.set_epoch(epoch)
    return digest(list(loader))


# training samples


def test_sample_depends_on_seed_epoch_and_index_alone(labels):
    keys = [(epoch, index) for epoch in (0, 5) for index in range(9)]
    first = training(labels)
    forward = {key: first[key] for key in keys}
    again = training(labels)
    np.random.seed(1)
    torch.manual_seed(1)
    for key in reversed(keys):
        other = again[key]
        assert other.image.tobytes() == forward[key].image.tobytes()
        assert other.targets.tobytes() == forward[key].targets.tobytes()
    images = {sample.image.tobytes() for sample in forward.values()}
    images |= {training(labels, seed=4)[key].image.tobytes() for key in keys}
    assert len(images) == 2 * len(keys)  # and on each of the three


def test_samples_leave_the_global_random_state_alone(labels):
    np.random.seed(7)
    torch.manual_seed(7)
    loader = create_loader(training(labels), batch_size=4, workers=0, shuffle=True, seed=0)
    list(loader)
    drawn = np.random.random(), float(torch.rand(()))
    np.random.seed(7)
    torch.manual_seed(7)
    assert drawn == (np.random.random(), float(torch.rand(())))


def test_workers_do_not_change_an_epoch(labels):
    dataset = training(labels)
    alone = create_loader(dataset, batch_size=2, workers=0, shuffle=True, seed=1)
    epochs = [epoch_digest(alone, epoch) for epoch in range(3)]
    assert len(set(epochs)) == 3
    shared = create_loader(dataset, batch_size=2, workers=2, shuffle=True, seed=1)
    assert shared.num_workers >= min(2, multiprocessing.cpu_count())
    # the workers live on and learn of the epoch from the keys alone; begin in the middle as a resumed run does
    assert [epoch_digest(shared, epoch) for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]


def test_spawned_workers_do_not_change_an_epoch(labels):
    dataset = training(labels)
    alone = create_loader(dataset, batch_size=9, workers=0, shuffle=True, seed=1)
    spawned = create_loader(dataset, batch_size=9, workers=1, shuffle=True, seed=1)
    spawned.multiprocessing_context = "spawn"
    assert epoch_digest(spawned, 4) == epoch_digest(alone, 4)


def test_dataset_is_small_when_handed_to_workers(labels):
    assert len(pickle.dumps(training(labels))) < 6000


@pytest.mark.parametrize("options", [{}, {"rect": True}, {"hyp": replace(ALL_ON, mosaic=0.0)}])
def test_training_samples_are_well_formed(labels, options):
    dataset = training(labels, **options)
    found = 0
    for key in [(epoch, index) for epoch in range(4) for index in range(9)]:
        image, targets, _, _ = dataset[key]
        assert image.dtype == np.uint8 and image.flags.c_contiguous and image.shape[0] == 3
        assert targets.dtype == np.float32 and targets.shape[1:] == (5,)
        corners = np.concatenate((targets[:, 1:3] - targets[:, 3:] / 2, targets[:, 1:3] + targets[:, 3:] / 2))
        assert (corners > -1e-6).all() and (corners < 1 + 1e-6).all()
        assert (targets[:, 3:] > 0).all() and set(targets[:, 0]) <= {0, 1, 2}
        found += len(targets)
        if not options.get("rect"):
            assert image.shape == (3, 64, 64)
    assert found > 20


def test_training_boxes_lie_on_the_objects(labels):
    """Mosaic, copy-paste, perspective and flips: the bright rectangles are in the boxes and nowhere else."""
    hyp = replace(ALL_ON, mosaic=1.0, mixup=0.0, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
    dataset = DetectionDataset(labels, 128, hyp=hyp, augment=True)
    checked = 0
    for key in [(epoch, index) for epoch in range(4) for index in range(9)]:
        image, targets, _, _ = dataset[key]
        bright = (image[2] > 150) & (image[0] < 90)  # blue, and not the grey border
        covered = np.zeros_like(bright)
        for _, x, y, w, h in targets * 128:
            box = (
                slice(max(int(y - h / 2) - 1, 0), int(y + h / 2) + 2),
                slice(max(int(x - w / 2) - 1, 0), int(x + w / 2) + 2),
            )
            covered[box] = True
            assert bright[box].any()
            checked += 1
        # a rest below the size at which objects are dropped may lie bare
        assert (bright & ~covered).sum() <= 0.02 * bright.size
        if len(targets):
            assert bright[covered].mean() > 0.35
    assert checked > 60


def test_rect_training_enlarges_boxes_with_the_image(labels):
    """Without chance, a training sample of a rect set is the picture scaled up to fill its shape."""
    nothing = {name: 0.0 for name in ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr")}
    dataset = DetectionDataset(labels, 72, hyp=replace(Hyperparameters(), **nothing), augment=True, rect=True)
    enlarged = 0
    for index in range(9):
        image, targets, _, ((full_height, full_width), (scale, pad)) = dataset[(0, index)]
        height, width = image.shape[1:]
        enlarged += max(scale[0] * full_height, scale[1] * full_width) > 73
        assert np.isclose(scale[0] * full_height + 2 * pad[1], height, atol=1.01)
        np.testing.assert_allclose(targets[0, 1:] * (width, height, width, height), seen_box(image), atol=2)
    assert enlarged > 3


def seen_box(image: np.ndarray) -> np.ndarray:
    """Centre and size in pixels of the bright rectangle."""
    rows, columns = np.nonzero((image[2] > 150) & (image[0] < 90))
    x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1])


def test_mosaic_is_switched_by_its_probability_and_by_rect(labels, monkeypatch):
    calls, mosaic = [], DetectionDataset._mosaic

    def counted(self, rng, index):
        calls.append(index)
        return mosaic(self, rng, index)

    monkeypatch.setattr(DetectionDataset, "_mosaic", counted)
    for probability, options, count in ((1.0, {}, 9), (0.0, {}, 0), (1.0, {"rect": True}, 0)):
        calls.clear()
        dataset = training(labels, hyp=replace(ALL_ON, mosaic=probability, mixup=0.0), **options)
        for index in range(9):
            dataset[(0, index)]
        assert len(calls) == count


# validation samples


def one_picture(tmp_path: Path, height: int, width: int, text: str) -> LabelSet:
    tmp_path.joinpath("a.txt").write_text(text)
    image = np.zeros((height, width, 3), np.uint8)
    image[:] = (10, 20, 30)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    return load_labels([tmp_path / "a.png"], 2, cache=None, progress=False)


def test_square_validation_sample_by_hand(tmp_path):
    labels = one_picture(tmp_path, 50, 100, "1 .5 .5 .2 .4")
    image, targets, path, shape = DetectionDataset(labels, 64, hyp=Hyperparameters())[(0, 0)]
    assert image.shape == (3, 64, 64) and path == str(tmp_path / "a.png")
    assert image[:, 32, 32].tolist() == [30, 20, 10]  # red first
    assert (image[:, :16] == 114).all() and (image[:, 48:] == 114).all() and (image[0, 16:48] == 30).all()
    np.testing.assert_allclose(targets, [[1, 0.5, 0.5, 0.2, 0.2]], rtol=1e-6)
    assert shape == ((50, 100), ((0.64, 0.64), (0.0, 16.0)))


def test_rect_validation_sample_by_hand(tmp_path):
    labels = one_picture(tmp_path, 50, 100, "1 .25 .5 .2 .4")
    dataset = DetectionDataset(labels, 64, hyp=Hyperparameters(), rect=True, pad=0.5)
    image, targets, _, shape = dataset[(0, 0)]
    # 32 x 64 is 1 x 2 strides, half a stride more rounds up to 2 x 3
    assert image.shape == (3, 64, 96) and shape == ((50, 100), ((0.64, 0.64), (16.0, 16.0)))
    np.testing.assert_allclose(targets, [[1, (16 + 16) / 96, 0.5, 12.8 / 96, 12.8 / 64]], rtol=1e-6)


def test_enlarging_is_done_by_resizing_and_not_by_letterboxing(tmp_path):
    labels = one_picture(tmp_path, 10, 20, "")
    _, targets, _, shape = DetectionDataset(labels, 64, hyp=Hyperparameters())[(0, 0)]
    assert shape == ((10, 20), ((3.2, 3.2), (0.0, 16.0))) and targets.shape == (0, 5)


def test_sides_are_rounded_up(tmp_path):
    labels = one_picture(tmp_path, 33, 100, "")
    image = DetectionDataset(labels, 64, hyp=Hyperparameters()).load_image(0)
    assert image.shape == (22, 64, 3)  # 21.12
    # the ratio 49 / 98 · … in floating point must not give 50
    labels = one_picture(tmp_path, 98, 93, "")
    assert DetectionDataset(labels, 49, hyp=Hyperparameters()).load_image(0).shape == (49, 47, 3)


def test_shrinking_averages_in_validation(tmp_path):
    """Each pixel of the result is the mean of four; linear interpolation of every third would not be."""
    picture = np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), picture)
    labels = load_labels([tmp_path / "a.png"], 1, cache=None, progress=False)
    image = DetectionDataset(labels, 30, hyp=Hyperparameters()).load_image(0)
    mean = picture.reshape(30, 3, 30, 3, 3).mean((1, 3))
    assert np.abs(image - mean).max() <= 0.51
    linear = DetectionDataset(labels, 30, hyp=Hyperparameters(), augment=True).load_image(0)
    assert np.abs(linear - mean).max() > 10


def test_reduced_decoding_keeps_size_and_look(tmp_path, monkeypatch):
    factors = []

    def noted(path, reduce=1):
        factors.append(reduce)
        return read_image(path, reduce=reduce)

    monkeypatch.setattr("utils.dataloaders.read_image", noted)
    y, x = np.mgrid[:301, :403]
    picture = np.dstack([x % 256 // 2 + 60, y % 256 // 2 + 60, (x + y) // 4]).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "a.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 98])
    labels = load_labels([tmp_path / "a.jpg"], 1, cache=None, progress=False)
    for imgsz in (403, 300, 201, 100, 64, 40):
        plain = DetectionDataset(labels, imgsz, hyp=Hyperparameters()).load_image(0)
        fast = DetectionDataset(labels, imgsz, hyp=Hyperparameters(), augment=True).load_image(0)
        assert fast.shape == plain.shape and max(fast.shape) == imgsz
        assert np.abs(fast.astype(int) - plain)[2:-2, 2:-2].mean() < 3
    # never below the size that is wanted; validation reads the full picture
    assert factors[0::2] == [1] * 6 and factors[1::2] == [1, 1, 2, 4, 4, 8]


def test_batch_shapes_by_hand():
    # aspects .5 .75 | 1 1 | .8 1.25 | 2 2.5 | 4
    shapes = np.array(
        [[50, 100], [75, 100], [100, 100], [9, 9], [80, 100], [125, 100], [200, 100], [250, 100], [400, 100]]
    )
    found = batch_shapes(shapes, 64, 2, 32, 0.0)
    assert found.tolist() == [[64, 64]] * 2 + [[64, 64]] * 4 + [[64, 32]] * 2 + [[64, 32]]
    assert batch_shapes(shapes[:1], 64, 2, 32, 0.0).tolist() == [[32, 64]]
    assert batch_shapes(shapes[:2], 640, 2, 32, 0.5).tolist() == [[512, 672]] * 2  # 15.5 and 20.5 strides
    assert batch_shapes(shapes[:0], 64, 2, 32, 0.5).shape == (0, 2)


def test_rect_sorts_by_aspect_and_batches_fit(labels):
    dataset = DetectionDataset(labels, 64, hyp=Hyperparameters(), rect=True, batch_size=4)
    loader = create_loader(dataset, batch_size=4, workers=0, shuffle=False, seed=0)
    batches = list(loader)
    assert [len(batch.paths) for batch in batches] == [4, 4, 1]
    aspects = [h / w for batch in batches for (h, w), _ in batch.shapes]
    assert aspects == sorted(aspects)
    assert len({path for batch in batches for path in batch.paths}) == 9
    for batch in batches:
        for image, ((h, w), ((ratio_h, ratio_w), (pad_w, pad_h))) in zip(batch.images, batch.shapes, strict=True):
            height, width = image.shape[1:]
            assert round(h * ratio_h + 2 * pad_h) == height and round(w * ratio_w + 2 * pad_w) == width
    with pytest.raises(ValueError, match="rect"):
        create_loader(dataset, batch_size=4, workers=0, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="rect"):
        create_loader(dataset, batch_size=3, workers=0, shuffle=False, seed=0)


def test_validation_boxes_find_the_objects(labels):
    for rect in (False, True):
        dataset = DetectionDataset(labels, 96, hyp=Hyperparameters(), rect=rect, pad=0.5)
        for index in range(9):
            image, ((_, x, y, w, h),), _, _ = dataset[(0, index)]
            height, width = image.shape[1:]
            box = np.array([x, y, w, h]) * (width, height, width, height)
            np.testing.assert_allclose(seen_box(image), box, atol=1.6)


# sampler, batches, loader


def test_sampler():
    sampler = EpochSampler(10, seed=2, shuffle=True)
    sampler.set_epoch(3)
    keys = list(sampler)
    assert {epoch for epoch, _ in keys} == {3} and sorted(i for _, i in keys) == list(range(10))
    assert [i for _, i in keys] == np.random.default_rng((2, 3)).permutation(10).tolist()
    assert list(sampler) == keys
    sampler.set_epoch(4)
    assert [i for _, i in sampler] != [i for _, i in keys]
    straight = EpochSampler(3, seed=2, shuffle=False)
    assert list(straight) == [(0, 0), (0, 1), (0, 2)] and len(straight) == 3


def test_epoch_in_progress_keeps_its_number():
    sampler = EpochSampler(4, seed=0, shuffle=False)
    running = iter(sampler)
    next(running)
    sampler.set_epoch(9)
    assert next(running) == (0, 1)


def test_collate_numbers_the_targets(labels):
    dataset = DetectionDataset(labels, 64, hyp=Hyperparameters())
    samples = [dataset[(0, i)] for i in (2, 0, 1)]
    samples[1] = samples[1]._replace(targets=np.zeros((0, 5), np.float32))
    batch = collate(samples)
    assert batch.images.shape == (3, 3, 64, 64) and batch.images.dtype == torch.uint8
    assert batch.targets.dtype == torch.float32 and batch.targets[:, 0].tolist() == [0, 2]
    np.testing.assert_array_equal(batch.targets[:, 1:], np.concatenate([s.targets for s in samples]))
    assert batch.paths == [s.path for s in samples] and batch.shapes == [s.shape for s in samples]
    empty = collate([samples[1]])
    assert empty.targets.shape == (0, 6)


def test_loader_keeps_the_last_batch_and_bounds_the_workers(labels):
    loader = create_loader(training(labels), batch_size=4, workers=0, shuffle=True, seed=0)
    assert len(loader) == 3 and [len(batch.images) for batch in loader] == [4, 4, 1]
    assert create_loader(training(labels), batch_size=9, workers=64, shuffle=True, seed=0).num_workers == 1


def test_image_that_vanishes_is_one_line_from_a_worker_too(tmp_path):
    labels = one_picture(tmp_path, 20, 20, "")
    (tmp_path / "a.png").unlink()
    for workers in (0, 1):
        loader = create_loader(training(labels), batch_size=1, workers=workers, shuffle=False, seed=0)
        with pytest.raises(LabelError) as caught:
            list(loader)
        assert str(caught.value) == f"{tmp_path / 'a.png'}: cannot be read (No such file or directory)"


def test_worker_keeps_opencv_to_one_thread(labels):
    loader = create_loader(ThreadCount(labels, 64, hyp=ALL_ON), batch_size=9, workers=1, shuffle=False, seed=0)
    (batch,) = list(loader)
    assert set(batch.paths) <= {"0", "1"}


class ThreadCount(DetectionDataset):
    """Gives OpenCV's number of threads for a path."""

    def __getitem__(self, key):
        return super().__getitem__(key)._replace(path=str(cv2.getNumThreads()))


# splits


def config(root: Path, **splits) -> DataConfig:
    given = {"train": (), "val": (), "test": (), **{k: (root / v,) for k, v in splits.items()}}
    return DataConfig(file=root / "my.yaml", root=root, names=("a", "b", "c"), **given)


def test_split_is_read_and_cached_beside_the_labels(folder):
    data = config(folder, train="images", val="images/*.png")
    labels = load_split(data, "train", progress=False)
    assert len(labels) == 9
    (cache,) = (folder / "labels").glob("train.????????.cache")
    assert len(load_split(data, "val", progress=False)) == 6
    assert len(list((folder / "labels").glob("*.cache"))) == 2
    before = cache.read_bytes()
    assert len(load_split(data, "train", progress=False)) == 9 and cache.read_bytes() == before
    for file in (folder / "labels").glob("*.cache"):
        file.unlink()
    load_split(data, "train", cache=False, progress=False)
    assert not list((folder / "labels").glob("*.cache"))


def test_splits_that_cannot_be_read(tmp_path):
    (tmp_path / "images/none").mkdir(parents=True)
    (tmp_path / "images/bad").mkdir()
    (tmp_path / "images/bare").mkdir()
    (tmp_path / "images/bad/a.png").write_bytes(b"x")
    cv2.imwrite(str(tmp_path / "images/bare/a.png"), np.zeros((4, 4, 3), np.uint8))
    cases = {
        "none": "no images in .*none",
        "gone": "gone: no such file or folder",
        "bad": "none of 1 images can be read, first .*a.png: cannot be decoded",
        "bare": "no image has labels .*expected .*labels/bare/a.txt",
    }
    for name, text in cases.items():
        with pytest.raises(LabelError, match=f"my.yaml: train: .*{text}"):
            load_split(config(tmp_path, train=f"images/{name}"), "train", progress=False)
    with pytest.raises(LabelError, match="my.yaml: there is no 'test:'"):
        load_split(config(tmp_path, train="images/bare"), "test")
    assert load_split(config(tmp_path, val="images/bare"), "val", progress=False).missing == 1  # only background
    with pytest.raises(LabelError, match="'generate: circles' is unknown"):
        load_split(replace(config(tmp_path, val="images/bare"), generate="circles"), "val")


def test_real_photographs():
    if not BCCD.is_dir():
        pytest.skip(f"{BCCD} is not there")
    labels = load_labels(find_images([BCCD / "images" / "train"])[:40], 3, cache=None, progress=False)
    assert labels.problems == [] and sum(map(len, labels.boxes)) > 300
    dataset = DetectionDataset(labels, 160, hyp=Hyperparameters(), augment=True)
    batch = collate([dataset[(0, i)] for i in range(16)])
    assert batch.images.shape == (16, 3, 160, 160)
    assert 100 < len(batch.targets) < 1000
