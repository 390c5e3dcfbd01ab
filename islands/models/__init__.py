"""What is trained: built-in GPTs by name, or any `package.module:build` of the user.

A name and its settings are all that travels between processes; each builds the model for itself.
"""

from islands.models.check import check_model, must_have_shapes, window_loss
from islands.models.registry import (
    MODEL_NAMES,
    ModelDefaults,
    build_model,
    model_defaults,
    model_settings,
)

__all__ = [
    "MODEL_NAMES",
    "ModelDefaults",
    "build_model",
    "check_model",
    "model_defaults",
    "model_settings",
    "must_have_shapes",
    "window_loss",
]
