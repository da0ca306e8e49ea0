"""The exception tree, as its module draws it."""

import inspect
import pickle

import pytest

from kvtier import errors

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_a_kvtier_error_and_is_drawn(cls):
    assert issubclass(cls, errors.KvtierError)
    assert cls.__name__ in errors.__doc__


def test_usage_errors_name_the_argument_and_survive_process_boundaries():
    error = errors.SizeError("--len", "a size", "x")
    assert str(error) == "--len: expected a size, got 'x'"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.argument, str(again)) == (errors.SizeError, "--len", str(error))
