"""The images' recipes: hadolint has nothing to say, and what they begin with is named by digest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import SAFETY_S

from deploy.checks.images import DIGEST
from deploy.checks.rendering import DEPLOY

IMAGES = DEPLOY / "image"
RECIPES = sorted(IMAGES.glob("*/Dockerfile"))


def hadolint(recipe: Path) -> str:
    """Return what hadolint says; empty where all is fine."""
    binary = Path(sys.executable).with_name("hadolint")
    command = [str(binary), "--no-color", "--config", str(IMAGES / "hadolint.yaml"), str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S, check=False)
    assert (done.returncode == 0) == (not done.stdout), done
    return done.stdout


def base(recipe: str) -> str:
    found = re.search(r"^ARG BASE=(\S+)$", recipe, re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_is_fine(recipe):
    assert hadolint(recipe) == ""
    assert DIGEST.search(base(recipe.read_text()))


def test_all_images_begin_with_the_same():
    assert len({base(recipe.read_text()) for recipe in RECIPES}) == 1
    assert not DIGEST.search(base("ARG BASE=python:3.11-slim\n"))
