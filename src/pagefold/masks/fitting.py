"""Fitting: ridge regression (Hoerl and Kennard, 1970) from sums over rows, so that no rows need be kept.

For each layer one matrix of features serves all its outputs. Sums are float64. They also say how much of other rows'
variance a fit explains, without those rows: so the penalty is the one that explains most of rows that were held out.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

__all__ = ["Fit", "NormalEquations", "fit_ridge"]

_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties that are tried, in units of the features' mean variance."""


class Fit(NamedTuple):
    """Linear maps, one a layer and output.

    Attributes:
        weights: float64 ``[L, O, F]``.
        biases: float64 ``[L, O]``.
        penalty: that of the ridge, in units of the features' mean variance.
        explained: float64 ``[L, O]``, the share of variance that is explained (R2) of rows that were held out, by the
            fit to the others; None where none were.
    """

    weights: torch.Tensor
    biases: torch.Tensor
    penalty: float
    explained: torch.Tensor | None = None


class NormalEquations:
    """Sums over rows of features and outputs, by layer.

    Args:
        num_layers: ``L``.
        num_features: ``F``.
        num_outputs: ``O``.

    Attributes:
        num_rows: how many rows each layer was given.
    """

    def __init__(self, num_layers: int, num_features: int, num_outputs: int) -> None:
        self.num_rows = torch.zeros(num_layers, dtype=torch.float64)
        self._features = torch.zeros(num_layers, num_features, dtype=torch.float64)
        self._outputs = torch.zeros(num_layers, num_outputs, dtype=torch.float64)
        self._squares = torch.zeros(num_layers, num_outputs, dtype=torch.float64)
        self._products = torch.zeros(num_layers, num_features, num_features, dtype=torch.float64)
        self._crossed = torch.zeros(num_layers, num_features, num_outputs, dtype=torch.float64)

    def add(self, layer: int, features: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add rows.

        Args:
            layer: of the rows.
            features: ``[n, F]``, any float dtype.
            outputs: ``[n, O]``, any float dtype.
        """
        features, outputs = features.double(), outputs.double()
        self.num_rows[layer] += len(features)
        self._features[layer] += features.sum(0)
        self._outputs[layer] += outputs.sum(0)
        self._squares[layer] += outputs.square().sum(0)
        self._products[layer].addmm_(features.T, features)
        self._crossed[layer].addmm_(features.T, outputs)

    def __iadd__(self, other: NormalEquations) -> Self:
        self.num_rows += other.num_rows
        self._features += other._features
        self._outputs += other._outputs
        self._squares += other._squares
        self._products += other._products
        self._crossed += other._crossed
        return self

    def solve(self, penalty: float) -> Fit:
        """Return the maps with the least squared error plus ``penalty`` times their squared weights; biases are free.

        Args:
            penalty: in units of the mean variance of a layer's features, for each row. At least a little, where
                features may depend on each other.
        """
        num_rows = self.num_rows[:, None]
        means, centres = self._features / num_rows, self._outputs / num_rows
        covariances = self._products / num_rows[..., None] - means[:, :, None] * means[:, None]
        crossed = self._crossed / num_rows[..., None] - means[:, :, None] * centres[:, None]
        variances = covariances.diagonal(dim1=1, dim2=2)
        variances += penalty * variances.mean(1, keepdim=True)  # a view: it is the diagonal that grows
        weights = torch.linalg.solve(covariances, crossed).mT
        return Fit(weights, centres - (weights @ means[..., None])[..., 0], penalty)

    def explained_by(self, fit: Fit) -> torch.Tensor:
        """Return the share of the outputs' variance over these rows that ``fit`` explains: float64 ``[L, O]``."""
        num_rows, weights, biases = self.num_rows[:, None], fit.weights, fit.biases
        of_features = (weights @ self._features[..., None])[..., 0]
        errors = self._squares - 2 * (weights * self._crossed.mT).sum(-1) - 2 * biases * self._outputs
        errors += ((weights @ self._products) * weights).sum(-1) + 2 * biases * of_features + num_rows * biases.square()
        variances = self._squares - self._outputs.square() / num_rows
        return torch.where(variances > 0, 1 - errors / variances, 0.0)


def fit_ridge(fitted: NormalEquations, held_out: NormalEquations) -> Fit:
    """Return the fit to all rows, with the penalty that explains most of ``held_out`` when fitted to the others.

    Args:
        fitted: sums over rows; they grow by those of ``held_out``.
        held_out: sums over rows of other texts.
    """
    tried = [fitted.solve(penalty) for penalty in _PENALTIES]
    explained = [held_out.explained_by(fit) for fit in tried]
    best = max(range(len(tried)), key=lambda place: float(explained[place].mean()))
    fitted += held_out
    return fitted.solve(tried[best].penalty)._replace(explained=explained[best])
