"""A head profile as the calibration store holds it."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from kvtier.calibration.documents.base import Stored, check_same
from kvtier.calibration.documents.keys import ProfileKey, profile_key
from kvtier.heads.profile import HeadProfile, ModelShape


class ProfileDocument(Stored):
    """A head profile, with the same envelope as a curve."""

    schema_version: Literal[1] = 1
    profile: HeadProfile

    @model_validator(mode="after")
    def _is_finite_and_named_alike(self) -> Self:
        rows = self.profile.scores or ()
        costs = [number for cost in self.profile.costs for number in (cost.full, cost.profile)]
        if not all(math.isfinite(number) for row in (*rows, costs) for number in row):
            raise ValueError("profile has scores or costs that are not finite")
        if (self.profile.model, self.profile.revision) != (self.model, self.revision):
            raise ValueError("profile names another model or revision than its document")
        return self

    @classmethod
    def of(cls, profile: HeadProfile) -> Self:
        """The document of a profile made just now."""
        return cls(model=profile.model, revision=profile.revision, profile=profile)

    @property
    def key(self) -> ProfileKey:
        """The document's key in the store."""
        return profile_key(self.model, self.revision)

    def check_fits(self, model: str, revision: str | None, shape: ModelShape) -> None:
        """Raise CalibrationMismatchError unless it was made for this model and head layout."""
        found = {"model": self.model, "revision": self.revision, "shape": self.profile.shape}
        served = {"model": model, "revision": revision, "shape": shape}
        check_same("head profile", found, served)
