"""Runs inside the toolbox ``engines``: greedy generation of the bundled GGUF file by OpenVINO GenAI, token times included.

Input: ``gguf`` (path), ``prompts`` (texts), ``max_tokens``, ``threads``. Output: ``version``, and for each prompt its
``text``, ``sent``, ``times`` (seconds on the monotonic clock at which text arrived) and ``n_tokens``.
"""

import json
import sys
import time


def main(arguments: dict) -> dict:
    """Load once, then answer each prompt."""
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(arguments["gguf"], "CPU", INFERENCE_NUM_THREADS=arguments["threads"])
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = arguments["max_tokens"]
    config.do_sample = False
    answers = []
    for prompt in arguments["prompts"]:
        times: list[float] = []

        def note(_text: str, times: list[float] = times) -> bool:
            times.append(time.monotonic())
            return False

        sent = time.monotonic()
        result = pipeline.generate([prompt], config, note)
        n_tokens = int(result.perf_metrics.get_num_generated_tokens())
        answers.append({"text": result.texts[0], "times": times, "sent": sent, "n_tokens": n_tokens})
    return {"version": openvino_genai.__version__, "answers": answers}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
