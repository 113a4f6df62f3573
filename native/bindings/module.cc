// The extension tandem._native._core; one file a topic.
#include <nanobind/nanobind.h>

#include "bindings/kernels/bind_lora.h"
#include "bindings/transfer/bind_transfer.h"
#include "bindings/status.h"

NB_MODULE(_core, module) {
  // torch frees the storages that alias our buffers after the interpreter has ended, so nanobind
  // would report them, and the types they keep alive, as leaks at every clean exit.
  nanobind::set_leak_warnings(false);
  module.doc() = "Native core of Tandem: machine topology, thread pool, aligned memory, probes, kernels.";
  tandem::bindings::bind_status(module);
  tandem::bindings::bind_topology(module);
  tandem::bindings::bind_pool(module);
  tandem::bindings::bind_buffer(module);
  tandem::bindings::bind_probe(module);
  tandem::bindings::bind_direct_reader(module);
  tandem::bindings::bind_transfer_rails(module);
  tandem::bindings::bind_transfer_memory(module);
  tandem::bindings::bind_transfer_engine(module);
  tandem::bindings::bind_kernels(module);
  tandem::bindings::bind_linear(module);
  tandem::bindings::bind_attention(module);
  tandem::bindings::bind_row_ops(module);
  tandem::bindings::bind_recurrent(module);
  tandem::bindings::bind_state_space(module);
  tandem::bindings::bind_lora(module);
  tandem::bindings::bind_sampling(module);
  tandem::bindings::bind_store(module);
  tandem::bindings::bind_store_reads(module);
  tandem::bindings::bind_bytes_pool(module);
}
