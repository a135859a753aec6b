"""Recipes: one YAML grammar for every verb, checked as a whole, with all faults reported at
once."""

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
    DistillationSection,
    DocumentsSection,
    EvalSection,
    GeneratorSection,
    GuardsSection,
    ModelSection,
    QuestionSetSection,
    QuestionsSection,
    RaftSection,
    RegularizationSection,
    RetrievalSection,
    RowWeightsSection,
    TechniquesSection,
    TokenizerSection,
)
