#include "transfer/records/gmac.h"

#include <dlfcn.h>

#include <cstring>

namespace tandem::transfer {
namespace {

// The functions of libcrypto that are called, with their types as openssl/evp.h declares them since
// 1.1.0.
struct Libcrypto {
  void* (*new_context)() = nullptr;                                              // EVP_CIPHER_CTX_new
  void (*free_context)(void*) = nullptr;                                         // EVP_CIPHER_CTX_free
  const void* (*aes_256_gcm)() = nullptr;                                        // EVP_aes_256_gcm
  int (*init)(void*, const void*, void*, const uint8_t*, const uint8_t*) = nullptr;
  int (*update)(void*, uint8_t*, int*, const uint8_t*, int) = nullptr;           // EVP_EncryptUpdate
  int (*final)(void*, uint8_t*, int*) = nullptr;                                 // EVP_EncryptFinal_ex
  int (*control)(void*, int, int, void*) = nullptr;                              // EVP_CIPHER_CTX_ctrl
};

constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kMaxUpdate = 1 << 30;

class GmacTagger : public Tagger {
 public:
  GmacTagger(const Libcrypto& library, void* context) : library_(library), context_(context) {}
  ~GmacTagger() override { library_.free_context(context_); }

  static std::unique_ptr<Tagger> create(const Libcrypto& library, const Digest& key) {
    void* context = library.new_context();
    if (context == nullptr) return nullptr;
    auto tagger = std::make_unique<GmacTagger>(library, context);
    if (library.init(context, library.aes_256_gcm(), nullptr, key.data(), nullptr) != 1)
      return nullptr;
    return tagger;
  }

  bool make(uint64_t sequence, const uint8_t* data, size_t size,
            uint8_t out[kTagBytes]) override {
    // A nonce of 96 bits: the fixed field of SP 800-38D, section 8.2.1, is zero, since each
    // direction of each connection has its own key.
    uint8_t nonce[12] = {};
    for (int i = 0; i < 8; ++i) nonce[4 + i] = static_cast<uint8_t>(sequence >> (8 * i));
    int count = 0;
    uint8_t none[16];
    if (size > kMaxUpdate || library_.init(context_, nullptr, nullptr, nullptr, nonce) != 1)
      return false;
    // Without an output buffer `update` takes bytes that are authenticated and not encrypted.
    if (size > 0 && library_.update(context_, nullptr, &count, data, static_cast<int>(size)) != 1)
      return false;
    return library_.final(context_, none, &count) == 1 &&
           library_.control(context_, kGetTag, kTagBytes, out) == 1;
  }

 private:
  const Libcrypto& library_;
  void* const context_;
};

template <class Function>
bool find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

bool passes_vector(const Libcrypto& library) {
  // Test case 13 of the GCM specification: key and nonce of zeros, no text.
  constexpr uint8_t kExpected[kTagBytes] = {0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45, 0x36, 0xb9,
                                            0xa9, 0x63, 0xb4, 0xf1, 0xc4, 0xcb, 0x73, 0x8b};
  uint8_t tag[kTagBytes] = {};
  const std::unique_ptr<Tagger> tagger = GmacTagger::create(library, Digest{});
  return tagger && tagger->make(0, nullptr, 0, tag) &&
         std::memcmp(tag, kExpected, kTagBytes) == 0;
}

const Libcrypto* load() {
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    static Libcrypto library;
    if (find(handle, "EVP_CIPHER_CTX_new", &library.new_context) &&
        find(handle, "EVP_CIPHER_CTX_free", &library.free_context) &&
        find(handle, "EVP_aes_256_gcm", &library.aes_256_gcm) &&
        find(handle, "EVP_EncryptInit_ex", &library.init) &&
        find(handle, "EVP_EncryptUpdate", &library.update) &&
        find(handle, "EVP_EncryptFinal_ex", &library.final) &&
        find(handle, "EVP_CIPHER_CTX_ctrl", &library.control) && passes_vector(library))
      return &library;
    dlclose(handle);
  }
  return nullptr;
}

const Libcrypto* library() {
  static const Libcrypto* const loaded = load();  // Stays loaded: connections use it to the end.
  return loaded;
}

}  // namespace

bool has_gmac() { return library() != nullptr; }

std::unique_ptr<Tagger> make_gmac(const Digest& key) {
  return has_gmac() ? GmacTagger::create(*library(), key) : nullptr;
}

}  // namespace tandem::transfer
