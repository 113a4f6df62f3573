// Writes integer codes of one output to its column of a panel; weight_format.h says where what lies.
// Scalar code, included inside an anonymous namespace: of a variant, or of a layout's source; once
// where several sources are compiled as one.
#pragma once

// Writes `count` codes of `bits` bits, whole chunks, to a column; `to` is the first chunk of the
// panel.
inline void place_int_codes(int32_t bits, const uint8_t* codes, size_t count, size_t column,
                            uint8_t* to) {
  constexpr size_t kWordRow = kPanelColumns * 4;
  uint8_t* at = to + column * 4;
  const auto put = [&](uint32_t word) {
    __builtin_memcpy(at, &word, 4);
    at += kWordRow;
  };
  // Takes `width` bits at `shift` from each of 4 * fields codes; byte i of the result has those of
  // the codes 4 j + i.
  const auto gather = [](const uint8_t* c, size_t fields, int shift, int width) {
    const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    uint32_t word = 0;
    for (size_t j = 0; j < fields; ++j) {
      uint32_t four;
      __builtin_memcpy(&four, c + 4 * j, 4);
      word |= ((four >> shift) & mask) << (j * static_cast<size_t>(width));
    }
    return word;
  };
  const auto put_nibbles = [&](const uint8_t* c) {
    uint32_t low, high;
    __builtin_memcpy(&low, c, 4);
    __builtin_memcpy(&high, c + 4, 4);
    put((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4);
  };
  if (bits == 8) {
    for (size_t k = 0; k < count; k += 4, at += kWordRow) __builtin_memcpy(at, codes + k, 4);
  } else if (bits == 4) {
    for (size_t k = 0; k < count; k += 8) put_nibbles(codes + k);
  } else if (bits == 5 || bits == 6) {
    const size_t chunk = bits == 5 ? 32 : 16;
    for (size_t k = 0; k < count; k += chunk) {
      put(gather(codes + k, chunk / 4, 4, bits - 4));
      for (size_t i = 0; i < chunk; i += 8) put_nibbles(codes + k + i);
    }
  } else if (bits == 2) {
    for (size_t k = 0; k < count; k += 16) put(gather(codes + k, 4, 0, 2));
  } else {
    constexpr size_t kHalfRow = kPanelColumns * 2;
    for (size_t k = 0; k < count; k += 16, to += kWordRow + kHalfRow) {
      at = to + column * 4;
      put(gather(codes + k, 4, 0, 2));
      uint16_t third = 0;
      for (size_t j = 0; j < 4; ++j) {
        uint32_t four;
        __builtin_memcpy(&four, codes + k + 4 * j, 4);
        // The third bits of codes 0 to 3 are moved to bits 0, 8, 4 and 12.
        const uint32_t bits_of_four = (four >> 2) & 0x01010101u;
        third = static_cast<uint16_t>(third | ((bits_of_four | bits_of_four >> 12) & 0x1111u) << j);
      }
      __builtin_memcpy(to + kWordRow + column * 2, &third, 2);
    }
  }
}
