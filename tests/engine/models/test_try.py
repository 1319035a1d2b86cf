import pytest
import torch


@pytest.mark.parametrize(
    "kind", ["glm4_moe", "minimax_m2", "ministral3", "mistral3", "olmo3", "smollm3"]
)
def test_it(kind, tiny_model, reference_logits, run_paged):
    from batchgen.engine.loading.loader import load_model

    IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
    f = tiny_model(kind)
    m = load_model(f, device=torch.device("cpu"))
    a = run_paged(m, IDS, [64, 100, 1, 35])
    b = reference_logits(f, IDS)
    print(kind, float((a - b).abs().max() / b.abs().max()))
    assert float((a - b).abs().max() / b.abs().max()) < 1e-5
