"""For test_images.py: vLLM's LLaVA imports Pixtral, too, whose image processor needs torchvision; it is not among the pins, and nothing here uses Pixtral."""
import importlib.util
import sys
import types

if not importlib.util.find_spec("torchvision"):
    name = "transformers.models.pixtral.image_processing_pixtral"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name]._num_image_tokens = None  # type: ignore[attr-defined]
