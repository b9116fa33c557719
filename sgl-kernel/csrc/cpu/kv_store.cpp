// Writes new keys and values into the blocks of the cache (KvBlock in ops.h): a row at a time, or all 16 of a block.
//
// Of 16 and 32 bits only bits are moved. For a cache of 8 bits each row of a head is rounded to -127 to 127 with a scale of its own,
// so that what is stored of a token depends on that token alone.
#include "kv_bytes.h"
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

// Moves rows whose numbers are `Number` and, two or one together as KvBlock says, `Lane`.
template <typename Number, typename Lane>
struct Mover {
  static constexpr int64_t together = KvBlock<Number>::together;
  int64_t dim, padded_dim;

  static Lane lane_of(const Number* from) {
    Lane lane;
    __builtin_memcpy(&lane, from, sizeof(lane));
    return lane;
  }

  // The last lane, where a row ends in the middle of it, and those behind it.
  Lane end_of(const Number* row, int64_t d) const {
    Number numbers[together] = {};
    for (int64_t i = 0; d + i < dim && i < together; ++i) numbers[i] = row[d + i];
    return lane_of(numbers);
  }

  // `rows` keys, `stride` apart, into slots side by side; `to` is the lane of the first one.
  template <int64_t Rows>
  void put_keys(const Number* from, int64_t stride, Number* to) const {
    const int64_t whole = dim / together;
    for (int64_t at = 0; at < padded_dim / together; ++at, to += kBlockSlots * together) {
      Lane lanes[Rows];
      for (int64_t r = 0; r < Rows; ++r) {
        const Number* row = from + r * stride;
        lanes[r] = at < whole ? lane_of(row + at * together) : end_of(row, at * together);
      }
      __builtin_memcpy(to, lanes, sizeof(lanes));
    }
  }

  void put_value(const Number* from, Number* to) const {
    for (int64_t d = 0; d < dim; ++d) to[d * together] = from[d];
    for (int64_t d = dim; d < padded_dim; ++d) to[d * together] = Number{};
  }

  // Of an even slot and the one behind it.
  void put_two_values(const Number* from, int64_t stride, Number* to) const {
    const Number* other = from + stride;
    for (int64_t d = 0; d < dim; ++d) {
      to[2 * d] = from[d];
      to[2 * d + 1] = other[d];
    }
    for (int64_t d = 2 * dim; d < 2 * padded_dim; ++d) to[d] = Number{};
  }

  // Rows of one head, `stride` apart, into slots side by side of a block of keys and one of values.
  template <int64_t Rows>
  void put(const Number* key, int64_t key_stride, const Number* value, int64_t value_stride, int64_t slot, Number* keys,
           Number* values) const {
    put_keys<Rows>(key, key_stride, keys + KvBlock<Number>::key_place(slot, 0));
    if constexpr (Rows == 1 || together == 1) {
      for (int64_t r = 0; r < Rows; ++r) {
        put_value(value + r * value_stride, values + KvBlock<Number>::value_place(slot + r, 0, padded_dim));
      }
    } else {
      for (int64_t r = 0; r < Rows; r += 2) {
        put_two_values(value + r * value_stride, value_stride, values + KvBlock<Number>::value_place(slot + r, 0, padded_dim));
      }
    }
  }
};

// Writes rows as they are.
template <typename T>
struct Bits {
  const StoreKv<T>& call;

  template <int64_t Rows>
  void put(int64_t row, int64_t head, int64_t slot, T* keys, T* values) const {
    Mover<T, uint32_t>{call.dim, call.padded_dim}.template put<Rows>(call.k + row * call.k_stride + head * call.dim, call.k_stride,
                                                                     call.v + row * call.v_stride + head * call.dim, call.v_stride,
                                                                     slot, keys, values);
  }
};

// Rounds rows to 8 bits first.
template <typename T>
struct Rounded {
  const StoreKv<T, int8_t>& call;

  void round(const T* from, int8_t* to, float& scale) const {
    float numbers[kMostHeadDim];
    for (int64_t d = 0; d < call.dim; ++d) numbers[d] = load_one(from + d);
    for (int64_t d = call.dim; d < call.padded_dim; ++d) numbers[d] = 0.f;
    scale = to_whole(numbers, call.padded_dim, 127.f, to);
  }

  template <int64_t Rows>
  void put(int64_t row, int64_t head, int64_t slot, int8_t* keys, int8_t* values) const {
    int8_t key[Rows][kMostHeadDim], value[Rows][kMostHeadDim];
    float* key_scales = reinterpret_cast<float*>(keys + kBlockSlots * call.padded_dim) + slot;
    float* value_scales = reinterpret_cast<float*>(values + kBlockSlots * call.padded_dim) + slot;
    for (int64_t r = 0; r < Rows; ++r) {
      round(call.k + (row + r) * call.k_stride + head * call.dim, key[r], key_scales[r]);
      round(call.v + (row + r) * call.v_stride + head * call.dim, value[r], value_scales[r]);
    }
    Mover<int8_t, uint16_t>{call.padded_dim, call.padded_dim}.template put<Rows>(key[0], kMostHeadDim, value[0], kMostHeadDim, slot,
                                                                                keys, values);
  }
};

template <typename T, typename Cache, typename Put>
void store_rows(const StoreKv<T, Cache>& call, int64_t begin, int64_t end, const Put& put) {
  const int64_t size = KvBlock<Cache>::size(call.padded_dim);
  for (int64_t row = begin; row < end;) {
    const int64_t* slots = call.slots + row;
    const int64_t slot = slots[0] % kBlockSlots, block = slots[0] / kBlockSlots;
    bool is_block = slot == 0 && row + kBlockSlots <= end;
    for (int64_t i = 1; is_block && i < kBlockSlots; ++i) is_block = slots[i] == slots[0] + i;
    for (int64_t head = 0; head < call.heads; ++head) {
      Cache* keys = call.kv + (head * call.blocks + block) * size;
      Cache* values = call.kv + ((call.heads + head) * call.blocks + block) * size;
      if (is_block) {
        put.template put<kBlockSlots>(row, head, 0, keys, values);
      } else {
        put.template put<1>(row, head, slot, keys, values);
      }
    }
    row += is_block ? kBlockSlots : 1;
  }
}

}  // namespace

void store_kv(const StoreKv<uint32_t>& call, int64_t begin, int64_t end) { store_rows(call, begin, end, Bits<uint32_t>{call}); }
void store_kv(const StoreKv<uint16_t>& call, int64_t begin, int64_t end) { store_rows(call, begin, end, Bits<uint16_t>{call}); }
void store_kv(const StoreKv<float, int8_t>& call, int64_t begin, int64_t end) { store_rows(call, begin, end, Rounded<float>{call}); }
void store_kv(const StoreKv<bf16, int8_t>& call, int64_t begin, int64_t end) { store_rows(call, begin, end, Rounded<bf16>{call}); }

SGL_KERNEL_END
