"""Recipes: one YAML grammar for every verb, checked as a whole, with every fault reported at once."""

from kinject.recipe.data_sections import (
    CorpusSection,
    DistillationSection,
    DocumentsSection,
)
from kinject.recipe.eval_section import EvalSection, QuestionSetSection, RetrievalSection
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
    GeneratorSection,
    GuardsSection,
    ModelSection,
    QuestionsSection,
    RaftSection,
    RegularizationSection,
    RowWeightsSection,
    TechniquesSection,
    TokenizerSection,
)
