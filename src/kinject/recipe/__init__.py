"""Recipes: one YAML grammar for every verb, checked whole, with every fault told at once."""

from kinject.recipe.read import (
    AugmentRecipe,
    EvalRecipe,
    QuestionsRecipe,
    Recipe,
    StudyRecipe,
    TrainRecipe,
    is_model,
    read_recipe,
    read_values,
)
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
    "AugmentRecipe",
    "AugmentSection",
    "CorpusSection",
    "EvalRecipe",
    "EvalSection",
    "GeneratorSection",
    "GuardsSection",
    "ModelSection",
    "QuestionSetSection",
    "QuestionsRecipe",
    "QuestionsSection",
    "Recipe",
    "RegularizationSection",
    "ReplaySection",
    "RetrievalSection",
    "RowWeightsSection",
    "StudyRecipe",
    "TechniquesSection",
    "TokenizerSection",
    "TrainRecipe",
    "is_model",
    "read_recipe",
    "read_values",
]
