"""Recipes: one YAML grammar for every verb, checked whole, with every fault told at once."""

from kinject.recipe.read import Recipe, is_model, read_recipe, read_values
from kinject.recipe.sections import (
    AugmentSection,
    CorpusSection,
    EvalSection,
    GeneratorSection,
    GuardsSection,
    ModelSection,
    QuestionSetSection,
    QuestionsSection,
    RegularizationSection,
    ReplaySection,
    RetrievalSection,
    TokenizerSection,
)
from kinject.recipe.techniques_section import RowWeightsSection, TechniquesSection

__all__ = [
    "AugmentSection",
    "CorpusSection",
    "EvalSection",
    "GeneratorSection",
    "GuardsSection",
    "ModelSection",
    "QuestionSetSection",
    "QuestionsSection",
    "Recipe",
    "RegularizationSection",
    "ReplaySection",
    "RetrievalSection",
    "RowWeightsSection",
    "TechniquesSection",
    "TokenizerSection",
    "is_model",
    "read_recipe",
    "read_values",
]
