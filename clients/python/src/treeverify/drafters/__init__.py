"""Drafters: things that guess how a token sequence goes on, as a tree.

Drafter is the whole interface; anything with such a draft() works with Session.generate. NgramDrafter looks up text,
TraceDrafter repeats a recorded text, causal.py has drafters that are language models, onnx.py the one for ONNX files
(it needs onnxruntime, so it is imported by name: from treeverify.drafters.onnx import OnnxDrafter).
"""

from .causal import CausalDrafter
from .ngram import NgramDrafter
from .protocol import Drafter
from .trace import TraceDrafter

__all__ = ["CausalDrafter", "Drafter", "NgramDrafter", "TraceDrafter"]
