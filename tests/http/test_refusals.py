"""B36, B38: treeverifyd on broken copies of a small checkpoint. Each ends with 65 and one line that says why.

The line names the file, the tensor and the bytes, or the field of config.json. Nothing listens meanwhile; the
copies differ from one that starts (test_whole) by the one thing that the case names.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import tensors  # noqa: E402
from daemon import Daemon  # noqa: E402

PROGRAM = os.environ["TREEVERIFYD"]
VARIANTS = os.path.join(os.environ["TV_GOLDEN_DIR"], "model_variants")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
REFUSED = 65
NORM, ROUTER = "model.norm.weight", "model.layers.2.mlp.gate.weight"
ABSENT = object()

# What another value of each field of a V3 config would ask for; the line begins with the field's name.
FIELDS_V3 = [
    ("model_type", "llama"),
    ("model_type", "deepseek_v32"),
    ("model_type", ABSENT),
    ("architectures", ["DeepseekV2ForCausalLM"]),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("quantization_config", {"quant_method": "fp8"}),
    ("sliding_window", 4096),
    ("partial_rotary_factor", 0.5),
    ("use_mla", False),
    ("vocab_size", 0),
    ("vocab_size", ABSENT),
    ("hidden_size", "8"),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_attention_heads", 129),
    ("num_attention_heads", 1.5),
    ("num_key_value_heads", 1),
    ("q_lora_rank", 0),
    ("kv_lora_rank", 256),
    ("qk_rope_head_dim", 32),
    ("qk_nope_head_dim", 0),
    ("v_head_dim", ABSENT),
    ("intermediate_size", -1),
    ("max_position_embeddings", ABSENT),
    ("rms_norm_eps", -1e-6),
    ("tie_word_embeddings", "no"),
    ("n_routed_experts", ABSENT),
    ("n_routed_experts", 2048),
    ("moe_intermediate_size", ABSENT),
    ("n_shared_experts", 65),
    ("num_experts_per_tok", 9),
    ("first_k_dense_replace", -1),
    ("moe_layer_freq", 0),
    ("moe_layer_freq", [0, 1, 1]),
    ("norm_topk_prob", 1),
    ("routed_scaling_factor", ABSENT),
    ("topk_method", "greedy"),
    ("scoring_func", "softmax"),
    ("n_group", 3),
    ("topk_group", 3),
    ("rope_theta", 0),
    ("rope_interleave", "yes"),
    ("rope_scaling", {"type": "linear", "factor": 2}),
    ("rope_scaling", {"type": "yarn", "factor": 0.5}),
    ("rope_scaling", {"type": "yarn", "factor": 2, "rope_type": "dynamic"}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 2}),
]
FIELDS_V2 = [
    ("topk_method", "noaux_tc"),
    ("scoring_func", "sigmoid"),
    ("rope_interleave", False),
]


class RefusalTest(unittest.TestCase):
    def setUp(self):
        self.parent = tempfile.TemporaryDirectory()
        self.copy("v3-freq-two-no-shared")

    def tearDown(self):
        self.parent.cleanup()

    def copy(self, variant):
        self.dir = os.path.join(self.parent.name, "checkpoint")
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.copytree(os.path.join(VARIANTS, variant), self.dir)
        os.remove(self.path("refs.safetensors"))
        self.tensors = tensors.load_raw(self.path(SINGLE))

    def path(self, name):
        return os.path.join(self.dir, name)

    def field(self, name, value):
        with open(self.path("config.json")) as file:
            config = json.load(file)
        config[name] = value
        if value is ABSENT:
            del config[name]
        with open(self.path("config.json"), "w") as file:
            json.dump(config, file)

    def single(self, edit=None):
        tensors.save_raw(self.path(SINGLE), self.tensors, edit)

    def shards(self, first=(), second=(), index=None):
        """Two shards with the tensors in turn; further names for each, and for the index."""
        os.remove(self.path(SINGLE))
        names = list(self.tensors)
        held = [names[0::2] + list(first), names[1::2] + list(second)]
        for shard, mine in zip(SHARDS, held):
            tensors.save_raw(self.path(shard), {name: self.tensors[name] for name in mine})
        weights = {name: SHARDS[i % 2] for i, name in enumerate(names)}
        weights.update(index or {})
        with open(self.path(INDEX), "w") as file:
            json.dump({"weight_map": weights}, file)

    def started(self):
        with Daemon(PROGRAM, self.dir, "--threads", "1") as daemon:
            self.assertEqual(daemon.stop(), 0)

    def refused(self, *words):
        command = [PROGRAM, "--model", self.dir, "--listen", "127.0.0.1:0", "--threads", "1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        lines = ended.stderr.splitlines()
        self.assertEqual((ended.returncode, ended.stdout, len(lines)), (REFUSED, "", 1), ended.stderr)
        for word in words:
            self.assertIn(word, lines[0])

    def test_whole(self):
        self.started()
        self.single()
        self.started()
        self.shards()
        self.started()

    def test_truncated(self):
        size = os.path.getsize(self.path(SINGLE))
        os.truncate(self.path(SINGLE), size - 6)
        data = sum(len(tensor.data) for tensor in self.tensors.values())
        self.refused(SINGLE, "tensor 'model.", f"ends at byte {data} ", f"the file has {data - 6}")
        os.truncate(self.path(SINGLE), 5)
        self.refused(SINGLE, "5 bytes")

    def test_tail(self):
        with open(self.path(SINGLE), "ab") as file:
            file.write(bytes(6))
        data = sum(len(tensor.data) for tensor in self.tensors.values())
        self.refused(SINGLE, f"end at byte {data} ", f"the file has {data + 6}")

    def test_header_is_longer_than_the_file(self):
        size = os.path.getsize(self.path(SINGLE))
        with open(self.path(SINGLE), "r+b") as file:
            file.write(struct.pack("<Q", size - 7))
        self.refused(SINGLE, f"header of {size - 7} bytes", f"({size} bytes)")

    def test_overlap(self):
        names = list(self.tensors)

        def edit(header):
            for name in names[1:]:
                header[name]["data_offsets"] = [at - 2 for at in header[name]["data_offsets"]]

        self.single(edit)
        at = len(self.tensors[names[0]].data)
        self.refused(SINGLE, f"'{names[0]}'", f"'{names[1]}'", f"at byte {at - 2} ", f"at {at}")

    def test_bytes_against_shape(self):
        rows, cols = self.tensors["lm_head.weight"].shape

        def edit(header):
            header["lm_head.weight"]["shape"] = [rows, cols + 1]

        self.single(edit)
        have = len(self.tensors["lm_head.weight"].data)
        self.refused(SINGLE, "'lm_head.weight'", f"has {have} bytes", f"need {have + 2 * rows}")

    def test_shape_against_config(self):
        self.tensors["lm_head.weight"].shape.reverse()
        self.single()
        have = len(self.tensors["lm_head.weight"].data)
        self.refused(SINGLE, "'lm_head.weight'", "[8, 67]", "[67, 8]", f"{have} bytes")

    def test_missing_tensor(self):
        removed = self.tensors.pop(ROUTER)
        self.assertGreater(len(removed.data), 0)
        left = sum(len(tensor.data) for tensor in self.tensors.values())
        self.single()
        self.refused(f"'{ROUTER}' is missing", SINGLE, f"{len(self.tensors)} tensors of {left} bytes")
        self.shards()
        self.refused(f"'{ROUTER}' is missing", SHARDS[0], f"{left} bytes")

    def test_duplicate_across_shards(self):
        name = list(self.tensors)[0]
        self.shards(second=[name])
        size = len(self.tensors[name].data)
        self.refused(f"'{name}'", f"{SHARDS[0]} ({size} bytes)", f"{SHARDS[1]} ({size} bytes)")

    def test_duplicate_in_a_header(self):
        self.single()
        with open(self.path(SINGLE), "rb") as file:
            data = file.read()
        (size,) = struct.unpack_from("<Q", data)
        twin = b'"lm_head.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}, '
        header = b"{" + twin + data[9 : 8 + size]
        with open(self.path(SINGLE), "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + data[8 + size :])
        self.refused(SINGLE, "'lm_head.weight' is twice in the header, byte 77")

    def test_dtype(self):
        name = "model.layers.1.mlp.up_proj.weight"
        for dtype in ("F8_E4M3", "I16", "F64"):
            with self.subTest(dtype):
                tensor = self.tensors[name]
                rows, cols = tensor.shape
                size = rows * cols * {"F8_E4M3": 1, "I16": 2, "F64": 8}[dtype]
                self.tensors[name] = tensors.Tensor(dtype, tensor.shape, bytes(size))
                self.single()
                self.refused(SINGLE, f"'{name}'", dtype, f"({size} bytes)")
        self.tensors[name] = tensors.Tensor("Q4", tensor.shape, bytes(8))
        self.single()
        self.refused(SINGLE, f"'{name}'", "unknown dtype 'Q4'")

    def test_not_finite(self):
        for name, bits in ((NORM, 0x7FC0), (ROUTER, 0x7F80)):
            with self.subTest(name):
                tensor = self.tensors[name]
                whole, count = tensor.data, len(tensor.data) // 2
                tensor.data = whole[:6] + struct.pack("<H", bits) + whole[8:]
                self.single()
                self.refused(
                    SINGLE, f"'{name}'", f"1 of {count} values", "element 3", f"{2 * count} bytes"
                )
                tensor.data = whole

    def test_index_names_a_missing_shard(self):
        self.shards()
        os.remove(self.path(SHARDS[1]))
        count, first = len(self.tensors) // 2, list(self.tensors)[1]
        self.refused(f"{INDEX} lists {count} tensors in {SHARDS[1]}", f"'{first}'", "not in the folder")

    def test_index_against_shards(self):
        names = list(self.tensors)
        self.shards(index={names[0]: SHARDS[1]})
        self.refused(INDEX, f"'{names[0]}'", SHARDS[0], SHARDS[1])
        self.copy("v3-freq-two-no-shared")
        self.shards(index={"ghost.weight": SHARDS[0]})
        self.refused(INDEX, "'ghost.weight'", SHARDS[0])
        self.copy("v3-freq-two-no-shared")
        self.shards(index={"ghost.weight": "../" + SHARDS[0]})
        self.refused(INDEX, "'ghost.weight'")

    def test_config_file(self):
        os.remove(self.path("config.json"))
        self.refused("config.json")
        with open(self.path("config.json"), "w") as file:
            file.write('{"model_type": ')
        self.refused("config.json, byte ")

    def test_fields(self):
        for variant, fields in (
            ("v3-freq-two-no-shared", FIELDS_V3),
            ("v2-freq-two-top-one", FIELDS_V2),
        ):
            for name, value in fields:
                with self.subTest(variant, field=name, value=value):
                    self.copy(variant)
                    self.field(name, value)
                    self.refused(f"config.json: {name}")

    def test_fields_together(self):
        self.copy("v2-freq-two-top-one")
        self.field("norm_topk_prob", True)
        self.refused("config.json: norm_topk_prob is true with routed_scaling_factor")
        self.field("routed_scaling_factor", 1.0)
        self.refused("config.json: norm_topk_prob is true with num_experts_per_tok 1")
        self.field("num_experts_per_tok", 2)
        self.started()


if __name__ == "__main__":
    unittest.main(verbosity=1)
