"""SGLang's own classes of the families that are trained here and that SGLang serves on a CPU."""
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM, MixtralForCausalLM,
              Glm4MoeForCausalLM]
