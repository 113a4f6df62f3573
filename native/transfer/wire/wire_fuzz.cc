// libFuzzer target: any bytes as a header or a payload. Nothing may crash, and what is accepted must
// mean the same when it is written and read again. The first byte chooses the decoder.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "transfer/wire/wire.h"

namespace tandem::transfer {
namespace {

// A payload that was accepted is written as it was read: one meaning, one form.
template <class Encode, class Decode>
void check_round_trip(std::string_view payload, Encode encode, Decode decode) {
  auto decoded = decode(payload);
  if (!decoded.is_ok()) return;
  const std::string bytes = encode(decoded.value());
  auto again = decode(bytes);
  if (!again.is_ok() || encode(again.value()) != bytes) abort();
}

void check_header(const uint8_t* data, size_t size) {
  if (size < kHeaderBytes) return;
  Result<Frame> frame = decode_header(data);
  if (!frame.is_ok()) return;
  uint8_t bytes[kHeaderBytes];
  encode_header(frame.value(), bytes);
  Result<Frame> again = decode_header(bytes);
  if (!again.is_ok() || again.value().id != frame.value().id ||
      again.value().offset != frame.value().offset ||
      again.value().payload_bytes != frame.value().payload_bytes)
    abort();
}

}  // namespace
}  // namespace tandem::transfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem::transfer;
  if (size == 0) return 0;
  const std::string_view payload(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 6) {
    case 0:
      check_header(data + 1, size - 1);
      break;
    case 1:
      check_round_trip(payload, encode_hello, decode_hello);
      break;
    case 2:
      check_round_trip(payload, encode_challenge, decode_challenge);
      break;
    case 3:
      check_round_trip(payload, encode_description, decode_description);
      break;
    case 4: {
      const uint16_t version = data[0] / 6 % 2 == 0 ? kCallsVersion : kFilesVersion;
      const auto decode = [=](std::string_view bytes) { return decode_grant(bytes, version); };
      const auto encode = [=](const Grant& grant) { return encode_grant(grant, version); };
      check_round_trip(payload, encode, decode);
      break;
    }
    default:
      decode_error(data[0] / 6, payload);
  }
  return 0;
}
