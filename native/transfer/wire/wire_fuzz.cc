// libFuzzer target: any bytes as a header, a payload or a stream of records. Nothing may crash, and
// accepted input must mean the same after it is encoded and decoded again. The first byte chooses
// the decoder.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "transfer/records/record.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {
namespace {

// An accepted payload must be encoded exactly as it was decoded, so that each meaning has one form.
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

// A stream with a genuine beginning that is overwritten with any bytes: the opened bytes must be a
// beginning of the sealed ones. The input's first bytes choose how much is sealed, and the place of
// the others.
void check_records(std::string_view input) {
  if (input.size() < 4) return;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(input[i]); };
  const std::string plain(1 + byte(0) + 300 * (byte(1) % 8), 'p');
  RecordWriter writer(Tagger::create(TagKind::kHmac, Digest{}));
  std::string stream;
  for (int part = 0; part < 2; ++part) {
    const iovec whole{const_cast<char*>(plain.data()), plain.size()};
    if (writer.seal(&whole, 1) != plain.size()) abort();
    stream.append(reinterpret_cast<const char*>(writer.data()), writer.size());
    writer.on_sent(writer.size());
  }
  const size_t at = (byte(2) * size_t{256} + byte(3)) % (stream.size() + 1);
  input.remove_prefix(4);
  const bool is_other = stream.compare(at, input.size(), input) != 0;
  stream.replace(at, std::min(input.size(), stream.size() - at), input);
  RecordReader reader(Tagger::create(TagKind::kHmac, Digest{}));
  std::string opened;
  for (size_t done = 0;;) {
    uint8_t part[512];
    if (const size_t got = reader.take(part, sizeof part); got > 0) {
      opened.append(reinterpret_cast<const char*>(part), got);
      continue;
    }
    Result<bool> next = reader.open();
    if (!next.is_ok()) break;
    if (next.value()) continue;
    if (done == stream.size()) break;
    const auto [space, room] = reader.space();
    const size_t size = std::min(room, stream.size() - done);
    std::memcpy(space, stream.data() + done, size);
    reader.add(size);
    done += size;
  }
  if (opened != (plain + plain).substr(0, opened.size())) abort();
  if (!is_other && opened.size() != 2 * plain.size()) abort();
}

}  // namespace
}  // namespace tandem::transfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem::transfer;
  if (size == 0) return 0;
  const std::string_view payload(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 8) {
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
      const uint16_t version = data[0] / 8 % 2 == 0 ? kCallsVersion : kFilesVersion;
      const auto decode = [=](std::string_view bytes) { return decode_grant(bytes, version); };
      const auto encode = [=](const Grant& grant) { return encode_grant(grant, version); };
      check_round_trip(payload, encode, decode);
      break;
    }
    case 5: {
      const uint16_t version = data[0] / 8 % 2 == 0 ? kDebtsVersion : kTagsVersion;
      const auto decode = [=](std::string_view bytes) { return decode_proof(bytes, version); };
      const auto encode = [=](const Proof& proof) { return encode_proof(proof, version); };
      check_round_trip(payload, encode, decode);
      break;
    }
    case 6:
      check_records(payload);
      break;
    default:
      decode_error(data[0] / 8, payload);
  }
  return 0;
}
