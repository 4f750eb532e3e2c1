"""Data set, sampler and loader.

A sample is a pure function of (seed, epoch, index): the sampler hands out (epoch, index), and all
randomness of a sample comes from the generator made of the three. Workers, order and history cannot matter.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from utils import augmentations as aug
from utils.config import DataConfig, Hyperparameters
from utils.labels import LabelError, LabelSet, find_images, label_path, load_labels, read_image
from utils.shapes import draw_shapes

Placement = tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]
"""(height, width) of the file's image, then the scale (y, x) to the network's input and the border (x, y) in it."""


class Sample(NamedTuple):
    """One image uint8 `[3, H, W]` RGB and its targets float32 `[n, 5]`: class, x, y, width, height, fractions."""

    image: np.ndarray
    targets: np.ndarray
    path: str
    shape: Placement


class Batch(NamedTuple):
    """Images uint8 `[B, 3, H, W]` RGB; targets float32 `[N, 6]`: image in the batch, class, x, y, w, h, fractions."""

    images: torch.Tensor
    targets: torch.Tensor
    paths: list[str]
    shapes: list[Placement]


class DetectionDataset(Dataset):
    """Images and objects of a `LabelSet`, made ready for the network.

    `dataset[(epoch, index)]` is a `Sample`. With `augment` it is drawn anew every epoch and `imgsz` square;
    without, the image is resized to a long side of `imgsz` and letterboxed. `rect` sorts the images by aspect
    and gives every batch of `batch_size` the smallest shape that holds it, a multiple of `stride`, with
    `pad` strides more; it switches mosaic off.

    Everything is kept in a few flat arrays: cheap to hand to workers, and no page of it is copied by
    reference counting in them.
    """

    def __init__(
        self,
        labels: LabelSet,
        imgsz: int,
        *,
        hyp: Hyperparameters,
        seed: int = 0,
        augment: bool = False,
        rect: bool = False,
        batch_size: int = 16,
        stride: int = 32,
        pad: float = 0.0,
    ) -> None:
        self.imgsz, self.hyp, self.seed = imgsz, hyp, seed
        self.augment, self.rect, self.batch_size = augment, rect, batch_size
        order = np.arange(len(labels))
        if rect:
            height, width = labels.shapes.T
            order = np.lexsort((height, height / width))  # ties by size, so that no algorithm decides
        boxes = [labels.boxes[i] for i in order]
        polygons = [polygon for i in order for polygon in labels.segments[i]]
        self._paths = np.array([os.fsencode(labels.images[i]) for i in order], np.bytes_)
        self._shapes = labels.shapes[order]
        self._boxes = np.concatenate([np.zeros((0, 5), np.float32), *boxes])
        self._starts = np.cumsum([0, *map(len, boxes)])
        self._points = np.concatenate([np.zeros((0, 2), np.float32), *polygons])
        self._lengths = np.array([len(polygon) for polygon in polygons], np.int64)
        self._point_starts = np.concatenate(([0], np.cumsum(self._lengths)))[self._starts]
        if rect:
            self._input_shapes = batch_shapes(self._shapes, imgsz, batch_size, stride, pad)
        else:
            self._input_shapes = np.full((len(order), 2), imgsz)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def boxes(self) -> np.ndarray:
        """All objects, float32 `[n, 5]`: class, x, y, width, height, fractions."""
        return self._boxes

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        rng = np.random.default_rng((self.seed, epoch, index))
        path = os.fsdecode(self._paths[index])
        if not self.augment:
            image, boxes, placement = self._plain(index)
        else:
            image, boxes, placement = self._augmented(rng, index)
        height, width = image.shape[:2]
        targets = aug.to_fractions(boxes, (width, height))
        planes = np.empty((3, height, width), np.uint8)
        for place, channel in enumerate((2, 1, 0)):  # blue-green-red in, red-green-blue out
            cv2.extractChannel(image, channel, planes[place])
        return Sample(planes, targets, path, placement)

    def load_image(self, index: int) -> np.ndarray:
        """Image `index` with a long side of `imgsz`, uint8 `[H, W, 3]`, blue first."""
        height, width = (int(side) for side in self._shapes[index])
        long = max(height, width)
        # rounded up, without the error that a floating-point ratio brings
        size = (-(-width * self.imgsz // long), -(-height * self.imgsz // long))
        shrinks = self.imgsz < long
        reduce = 1
        if self.augment:  # training wants speed: let the decoder do the halving
            reduce = max(factor for factor in (1, 2, 4, 8) if factor == 1 or long >= factor * self.imgsz)
        image = read_image(os.fsdecode(self._paths[index]), reduce=reduce)
        if image.shape[1::-1] != size:
            area = shrinks and not self.augment
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR)
        return image

    def _objects(self, index: int, size: tuple[float, float], offset: tuple[float, float]) -> aug.Objects:
        rows = slice(self._starts[index], self._starts[index + 1])
        points = slice(self._point_starts[index], self._point_starts[index + 1])
        return aug.to_pixels(self._boxes[rows], self._points[points], self._lengths[rows], size, offset)

    def _fitted(self, index: int) -> tuple[np.ndarray, aug.Objects, Placement]:
        """Image `index` letterboxed to its input shape."""
        image = self.load_image(index)
        height, width = image.shape[:2]
        shape = tuple(int(side) for side in self._input_shapes[index])
        image, ratio, pad = aug.letterbox(image, shape, scaleup=self.augment)
        objects = self._objects(index, (width * ratio[0], height * ratio[1]), pad)
        full_height, full_width = (int(side) for side in self._shapes[index])
        scale = (height * ratio[1] / full_height, width * ratio[0] / full_width)
        return image, objects, ((full_height, full_width), (scale, pad))

    def _plain(self, index: int) -> tuple[np.ndarray, np.ndarray, Placement]:
        image, objects, placement = self._fitted(index)
        return image, objects.boxes, placement

    def _augmented(self, rng: np.random.Generator, index: int) -> tuple[np.ndarray, np.ndarray, Placement]:
        hyp = self.hyp
        if not self.rect and rng.random() < hyp.mosaic:
            image, boxes = self._mosaic(rng, index)
            if rng.random() < hyp.mixup:
                other = self._mosaic(rng, int(rng.integers(len(self))))
                image, boxes = aug.mixup(image, boxes, *other, aug.draw_mixup(rng))
            # there is no way back from four images to one file
            placement = (image.shape[:2], ((1.0, 1.0), (0.0, 0.0)))
        else:
            image, objects, placement = self._fitted(index)
            image, boxes = aug.random_perspective(image, objects, aug.draw_perspective(rng, hyp, image.shape[:2]))
        image = aug.hsv(image, aug.draw_colour(rng, hyp))
        image, boxes = aug.flip(image, boxes, aug.draw_flips(rng, hyp))
        return image, boxes, placement

    def _mosaic(self, rng: np.random.Generator, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A mosaic around image `index`, `imgsz` square, with its boxes in pixels."""
        imgsz, hyp = self.imgsz, self.hyp
        mosaic = aug.draw_mosaic(rng, index, len(self), imgsz)
        tiles = [self.load_image(i) for i in mosaic.indices]
        canvas, offsets = aug.paste_tiles(tiles, mosaic, imgsz)
        parts = [
            self._objects(i, tile.shape[1::-1], offset)
            for i, tile, offset in zip(mosaic.indices, tiles, offsets, strict=True)
        ]
        objects = aug.clip_objects(aug.Objects.joined(parts), (2 * imgsz, 2 * imgsz))
        chosen = aug.draw_copy_paste(rng, objects.lengths, hyp.copy_paste)
        canvas, objects = aug.copy_paste(canvas, objects, chosen)
        change = aug.draw_perspective(rng, hyp, canvas.shape[:2], border=-imgsz // 2)
        return aug.random_perspective(canvas, objects, change)


def batch_shapes(shapes: np.ndarray, imgsz: int, batch_size: int, stride: int, pad: float) -> np.ndarray:
    """Input shape (height, width) for each image, int `[n, 2]`; `shapes` `[n, 2]` are in the order of the batches."""
    aspect = shapes[:, 0] / shapes[:, 1]
    starts = np.arange(0, len(aspect), batch_size)
    if not len(starts):
        return np.zeros((0, 2), int)
    flattest, tallest = np.minimum.reduceat(aspect, starts), np.maximum.reduceat(aspect, starts)
    sides = np.ones((len(starts), 2))
    sides[:, 0] = np.where(tallest < 1, tallest, 1)  # all are wide: less height
    sides[:, 1] = np.where(flattest > 1, 1 / flattest, 1)  # all are tall: less width
    strides = np.ceil(sides * imgsz / stride + pad).astype(int)
    return np.repeat(strides * stride, batch_size, axis=0)[: len(aspect)]


class EpochSampler(Sampler):
    """Pairs (epoch, index), the order of an epoch being a permutation from (seed, epoch), or ascending."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Which epoch the next iteration is, and with which of its samples it begins."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        epoch = self.epoch  # a change in the middle of an epoch must not reach it
        return ((epoch, int(index)) for index in order[self.start :])


def collate(samples: list[Sample]) -> Batch:
    """Samples of one shape as a batch."""
    images = torch.from_numpy(np.stack([sample.image for sample in samples]))
    owners = np.repeat(np.arange(len(samples), dtype=np.float32), [len(sample.targets) for sample in samples])
    targets = np.concatenate((owners[:, None], np.concatenate([sample.targets for sample in samples])), 1)
    return Batch(
        images,
        torch.from_numpy(targets),
        [sample.path for sample in samples],
        [sample.shape for sample in samples],
    )


def _init_worker(_: int) -> None:
    cv2.setNumThreads(0)  # the workers are the parallelism; each with a pool of its own would fight for the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the training decides when to stop


def create_loader(
    dataset: DetectionDataset, *, batch_size: int, workers: int, shuffle: bool, seed: int
) -> DataLoader[Batch]:
    """Batches of the data set, the last one smaller when they do not divide.

    `loader.sampler.set_epoch(epoch)` chooses the epoch before it is iterated. No more workers are started
    than there are cores or batches; 0 reads in this process. The global random state is left alone.
    """
    if dataset.rect and (shuffle or batch_size != dataset.batch_size):
        raise ValueError("batches of a rect data set have their order and size from the data set")
    batches = -(-len(dataset) // batch_size)
    workers = max(min(workers, os.cpu_count() or 1, batches), 0)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochSampler(len(dataset), seed, shuffle),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate,
        worker_init_fn=_init_worker,
        # the loader draws a number when iterated; without this it comes from the global generator
        generator=torch.Generator().manual_seed(seed),
    )


def load_split(data: DataConfig, split: str, *, cache: bool = True, progress: bool = True) -> LabelSet:
    """Images and labels of the split `train`, `val` or `test`, the built-in set being drawn when it is not there.

    `cache` keeps the checked labels beside the label folder. Raises `LabelError` when there is nothing to read.
    """
    paths = {"train": data.train, "val": data.val, "test": data.test}[split]
    if not paths:
        raise LabelError(f"{data.file}: there is no '{split}:' in it")
    if data.generate == "shapes" and not data.root.exists():
        draw_shapes(data.root)
    elif data.generate not in (None, "shapes"):
        raise LabelError(f"{data.file}: 'generate: {data.generate}' is unknown (the built-in set is 'shapes')")
    places = ", ".join(map(str, paths))
    try:
        images = find_images(paths)
    except LabelError as error:
        raise LabelError(f"{data.file}: {split}: {error}") from None
    if not images:
        raise LabelError(f"{data.file}: {split}: there are no images in {places}")
    labels = load_labels(images, data.nc, cache=_cache_file(images, split) if cache else None, progress=progress)
    if not len(labels):
        raise LabelError(f"{data.file}: {split}: none of {len(images)} images can be read, first {labels.problems[0]}")
    if split == "train" and labels.missing == len(labels):
        image = labels.images[0]
        raise LabelError(f"{data.file}: {split}: no image has labels (for {image} expected {label_path(image)})")
    return labels


def _cache_file(images: list[Path], split: str) -> Path:
    """In the folder `labels`, or in that of the labels when none is called so."""
    folder = label_path(images[0]).parent
    folder = next((parent for parent in (folder, *folder.parents) if parent.name == "labels"), folder)
    digest = hashlib.blake2b("\n".join(map(str, images)).encode("utf-8", "surrogateescape"), digest_size=4)
    return folder / f"{split}.{digest.hexdigest()}.cache"
