"""Model name of a request -> prompt format.

Contract: the table is the caller's (`ConvertOptions.model_versions`); an unknown name is refused
with the names that exist. Called by every protocol module.
"""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.recipe.options import ConvertOptions, ModelVersion


def resolve_model(model: str, options: ConvertOptions) -> ModelVersion:
    """The version of a model; InvalidRequest when nobody serves that name."""
    version = options.model_versions.get(model)
    if version is None:
        names = ", ".join(sorted(options.model_versions))
        raise InvalidRequest(
            f"The supported API model names are {names}, but you passed {model}.", param="model"
        )
    return version
