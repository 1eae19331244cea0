"""scikit-learn's bundled handwritten digits, with a fixed split."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

HELD_OUT = 540  # of 1797
SEED = 20


class Digits(NamedTuple):
    """`images`: float32 [n, 1, 8, 8], standardised by the training images. `labels`: int64 [n]."""

    images: torch.Tensor
    labels: torch.Tensor


def split_digits() -> tuple[Digits, Digits]:
    """Return the training and the held-out digits, which are disjoint."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    mean, deviation = images[training].mean(), images[training].std()
    images = (images - mean) / deviation
    return Digits(images[training], labels[training]), Digits(images[held_out], labels[held_out])


def write_images(path: Path, digits: Digits) -> None:
    """Write the images without labels, as the array `images` of an .npz file."""
    np.savez(path, images=digits.images.numpy())
