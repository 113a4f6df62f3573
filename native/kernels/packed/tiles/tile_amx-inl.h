// The tile registers of AMX; meanings in tile_emulated-inl.h. The kernel has granted their use to the
// process before this variant is chosen (base/machine/cpu_features.cc). Tile 4 is A, tile 5 is B.

// Makes the compiler finish all earlier writes to memory: GCC does not know that tile instructions
// read memory.
inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

class Tiles {
 public:
  Tiles(size_t rows, size_t step_bytes) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (size_t i = 0; i < 4; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = static_cast<uint8_t>(rows);
    }
    config.row_bytes[4] = static_cast<uint16_t>(step_bytes);
    config.rows[4] = static_cast<uint8_t>(rows);
    config.row_bytes[5] = 64;
    config.rows[5] = static_cast<uint8_t>(step_bytes / 4);
    finish_writes();
    _tile_loadconfig(&config);
  }
  // Release the tiles: the system would otherwise save idle tiles at every thread switch.
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  template <int kTile>
  void add_int8(const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_stride) {
    load_operands<kTile>(a, a_stride, b, b_stride);
    if constexpr (kTile == 0) _tile_dpbsud(0, 4, 5);
    if constexpr (kTile == 1) _tile_dpbsud(1, 4, 5);
    if constexpr (kTile == 2) _tile_dpbsud(2, 4, 5);
    if constexpr (kTile == 3) _tile_dpbsud(3, 4, 5);
  }

  template <int kTile>
  void add_bf16(const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_stride) {
    load_operands<kTile>(a, a_stride, b, b_stride);
    if constexpr (kTile == 0) _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTile == 1) _tile_dpbf16ps(1, 4, 5);
    if constexpr (kTile == 2) _tile_dpbf16ps(2, 4, 5);
    if constexpr (kTile == 3) _tile_dpbf16ps(3, 4, 5);
  }

  template <int kTile>
  void store(void* out, size_t stride) const {
    if constexpr (kTile == 0) _tile_stored(0, out, stride);
    if constexpr (kTile == 1) _tile_stored(1, out, stride);
    if constexpr (kTile == 2) _tile_stored(2, out, stride);
    if constexpr (kTile == 3) _tile_stored(3, out, stride);
  }

 private:
  // A is loaded once for all four tiles of sums, B for each of them.
  template <int kTile>
  void load_operands(const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_stride) {
    if constexpr (kTile == 0) {
      finish_writes();
      _tile_loadd(4, a, a_stride);
    }
    _tile_loadd(5, b, b_stride);
  }
};
