"""What transformers runs (`trust_remote_code=True`) to load a folder that `normlab export` wrote: normlab itself."""

try:
    from normlab.models import NormlabConfig, NormlabForCausalLM
except ImportError as error:
    raise ImportError(
        "this model is made of normlab's blocks: install the package normlab where you load it "
        "(pip install 'normlab @ git+ADDRESS', or '.' in a checkout)"
    ) from error

__all__ = ["NormlabConfig", "NormlabForCausalLM"]
