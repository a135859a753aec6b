"""The sections of a recipe, one frozen dataclass each, by subject."""

from kinject.recipe.sections.augment import (
    GENERATOR_REQUIRES,
    LIMIT_NAMES,
    MAX_SAMPLES,
    RESERVED_BODY,
    SAMPLING,
    AugmentSection,
    GeneratorSection,
    QuestionsSection,
    RaftSection,
    TokenTarget,
)
from kinject.recipe.sections.corpus import (
    CorpusSection,
    DocumentsSection,
    MixedCorpusSection,
)
from kinject.recipe.sections.eval import (
    ChatSection,
    EndpointModelSection,
    EvalSection,
    LoadingSection,
    LocalModelSection,
    PromptedSection,
    QuestionSetSection,
    RetrievalSection,
)
from kinject.recipe.sections.model import (
    Attention,
    Dtype,
    ModelSection,
    Quantization,
    TokenizerSection,
)
from kinject.recipe.sections.option import (
    option,
)
from kinject.recipe.sections.study import (
    ArmSection,
    ClaimSection,
    StudyModelSection,
    StudySection,
    SweepSection,
    TuneSection,
)
from kinject.recipe.sections.train import (
    DistillationSection,
    GuardsSection,
    HardExampleMiningSection,
    ProbeSection,
    ProbesSection,
    ProjectionSection,
    Reaction,
    RegularizationSection,
    RowWeightsSection,
    TechniquesSection,
)
