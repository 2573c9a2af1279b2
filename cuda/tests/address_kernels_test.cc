// Gathers by address on a GPU, and the registry that they look addresses up in. Small enough for compute-sanitizer.
#include <random>
#include <thread>

#include "cuda/device_registry.h"
#include "cuda/gather_kernels.h"
#include "cuda/tests/device.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;
using Words = std::vector<uint32_t>;

constexpr int32_t kOwner = 4711;

Words WordsOf(const Address& address) {
  Words words(4);
  address.Write(words.data());
  return words;
}

class AddressKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
  }

  // Registers memory under an entry that no other test has.
  Address Add(const void* base, int64_t bytes) {
    static int32_t entry = 0;
    const Address address{entry++, ++sequence_, kOwner};
    const RegistryFault fault = DeviceRegistry::Global().Add(address, base, bytes, {0});
    EXPECT_FALSE(fault) << fault.step << ": " << cudaGetErrorString(fault.error);
    return address;
  }

  std::mt19937 rng_{0};
  static int64_t sequence_;
};
int64_t AddressKernels::sequence_ = 0;

// A call on columns of several widths, each given once as a table and once by address.
struct Call {
  static constexpr int64_t kSlots = 5, kSteps = 7, kRows = 40;

  Call(std::mt19937& rng, const std::vector<int64_t>& widths) {
    Ints slot, anchor, length;
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
    for (int64_t r = 0; r < kRows; ++r) {
      slot.push_back(draw(-1, kSlots)), anchor.push_back(draw(-2, kSteps)), length.push_back(draw(0, kSteps));
    }
    for (const Ints* numbers : {&slot, &anchor, &length}) {
      ids.push_back(std::make_unique<DeviceArray<int32_t>>(*numbers));
    }
    call.rows = kRows, call.slots = kSlots, call.steps = kSteps;
    call.slot = ids[0]->data(), call.anchor = ids[1]->data(), call.length = ids[2]->data();
    for (const int64_t width : widths) {
      Bytes content(kSlots * kSteps * width);
      for (uint8_t& b : content) b = static_cast<uint8_t>(rng());
      tables.push_back(std::make_unique<DeviceArray<uint8_t>>(content, true));
    }
  }

  // Columns [2k] are tables, columns [2k + 1] the same by these words.
  void Bind(const std::vector<int64_t>& widths, const std::vector<Words>& words, int64_t alignment) {
    for (size_t k = 0; k < widths.size(); ++k) {
      address.push_back(std::make_unique<DeviceArray<uint32_t>>(words[k]));
      for (const bool by_address : {false, true}) {
        GatherColumn column;
        column.window = {-2, 5, true, static_cast<Pad>(k % 3)};
        column.step_bytes = widths[k];
        column.pad_value.fill(0xEE);
        if (by_address) column.address = address.back()->data();
        if (!by_address) column.table = tables[k]->data();
        column.address_alignment = alignment;
        outs.push_back(std::make_unique<DeviceArray<uint8_t>>(Bytes(kRows * 5 * widths[k], 0xAA)));
        masks.push_back(std::make_unique<DeviceArray<uint8_t>>(Bytes(kRows * 5, 0xAA)));
        column.out = outs.back()->data();
        call.columns.push_back(column);
        call.masks.push_back({masks.back()->data(), column.window, column.address, alignment, column.step_bytes});
      }
    }
  }

  void Launch() {
    const DeviceArray<int32_t> ticket({5}), ticket_out({0});
    GatherLaunch launch{16, nullptr, ticket.data(), ticket_out.data()};
    ASSERT_TRUE(DeviceRegistry::Global().View(&launch.registry));
    ASSERT_CUDA(LaunchGather(call, launch, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(ticket_out.Content()[0], 5);
  }

  GatherCall call;
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> ids;
  std::vector<std::unique_ptr<DeviceArray<uint32_t>>> address;
  std::vector<std::unique_ptr<DeviceArray<uint8_t>>> tables, outs, masks;
};

// More columns than one launch takes, all aligned and not.
TEST_F(AddressKernels, ReadsWhatATableReads) {
  std::vector<int64_t> any = {1, 2, 3, 4, 12, 16, 17, 44, 64}, aligned = {16, 32, 64, 4096};
  for (int copy = 0; copy < 3; ++copy) any.insert(any.end(), {11, 5, 160});
  for (const auto& [widths, alignment] :
       std::vector<std::pair<std::vector<int64_t>, int64_t>>{{any, 1}, {any, 128}, {aligned, 16}, {aligned, 128}}) {
    Call c(rng_, widths);
    std::vector<Words> words;
    for (size_t k = 0; k < widths.size(); ++k) {
      words.push_back(WordsOf(Add(c.tables[k]->data(), Call::kSlots * Call::kSteps * widths[k])));
    }
    c.Bind(widths, words, alignment);
    c.Launch();
    for (size_t k = 0; k < widths.size(); ++k) {
      EXPECT_EQ(c.outs[2 * k]->Content(), c.outs[2 * k + 1]->Content()) << widths[k];
      EXPECT_EQ(c.masks[2 * k]->Content(), c.masks[2 * k + 1]->Content()) << widths[k];
    }
    EXPECT_EQ(DeviceRegistry::Global().TakeFault("x"), "");
  }
}

TEST_F(AddressKernels, AMisalignedTable) {
  Call c(rng_, {16});
  const Bytes content = c.tables[0]->Content();
  DeviceArray<uint8_t> shifted(Bytes(content.size() + 16), true);
  const int64_t bytes = static_cast<int64_t>(content.size());
  ASSERT_CUDA(cudaMemcpy(shifted.data() + 3, content.data(), bytes, cudaMemcpyDefault));
  const Words words = WordsOf(Add(shifted.data() + 3, bytes));
  c.Bind({16}, {words}, 1);
  c.Launch();
  EXPECT_EQ(c.outs[0]->Content(), c.outs[1]->Content());
  EXPECT_EQ(DeviceRegistry::Global().TakeFault("x"), "");

  Call wrong(rng_, {16});
  wrong.Bind({16}, {words}, 16);
  wrong.Launch();
  EXPECT_NE(DeviceRegistry::Global().TakeFault("x").find("the alignment that the Addresses say"), std::string::npos);
}

TEST_F(AddressKernels, AStaleAddressGivesPaddingAndAFault) {
  for (const int64_t width : {16, 3}) {
    Call c(rng_, {width, width});
    const int64_t bytes = Call::kSlots * Call::kSteps * width;
    const Address good = Add(c.tables[0]->data(), bytes), bad = Add(c.tables[1]->data(), bytes);
    ASSERT_FALSE(DeviceRegistry::Global().Remove({bad}));
    c.Bind({width, width}, {WordsOf(good), WordsOf(bad)}, width == 16 ? 128 : 1);
    c.Launch();
    EXPECT_EQ(c.outs[0]->Content(), c.outs[1]->Content());
    for (const uint8_t b : c.outs[3]->Content()) ASSERT_EQ(b, 0xEE);
    for (const uint8_t b : c.masks[3]->Content()) ASSERT_EQ(b, 0);
    const std::string text = DeviceRegistry::Global().TakeFault("gather");
    EXPECT_EQ(text.rfind("gather: columns[3] on GPU 0: got the address of a table that was closed or freed", 0), 0u)
        << text;
    EXPECT_EQ(DeviceRegistry::Global().TakeFault("gather"), "");
  }
}

TEST_F(AddressKernels, OtherFaults) {
  Call c(rng_, {4});
  const int64_t bytes = Call::kSlots * Call::kSteps * 4;
  const Address small = Add(c.tables[0]->data(), bytes - 1), whole = Add(c.tables[0]->data(), bytes);
  const std::pair<Address, const char*> cases[] = {
      {small, "fewer bytes"},
      {{whole.entry, whole.sequence, kOwner + 1}, "no memory of this process"},
      {{kRegistryEntries, whole.sequence, kOwner}, "no memory of this process"},
      {{-1, whole.sequence, kOwner}, "no memory of this process"},
      {Address{}, "no memory of this process"},
  };
  for (const auto& [address, text] : cases) {
    Call call(rng_, {4});
    call.Bind({4}, {WordsOf(address)}, 16);
    call.Launch();
    const std::string fault = DeviceRegistry::Global().TakeFault("gather");
    EXPECT_NE(fault.find(text), std::string::npos) << fault;
  }
}

TEST_F(AddressKernels, AnEntryIsUsedAgain) {
  Call c(rng_, {8});
  const int64_t bytes = Call::kSlots * Call::kSteps * 8;
  const Address first = Add(c.tables[0]->data(), bytes);
  ASSERT_FALSE(DeviceRegistry::Global().Remove({first}));
  ASSERT_FALSE(DeviceRegistry::Global().Remove({first}));
  const Address second{first.entry, ++sequence_, kOwner};
  ASSERT_FALSE(DeviceRegistry::Global().Add(second, c.tables[0]->data(), bytes, {0}));
  ASSERT_FALSE(DeviceRegistry::Global().Remove({first}));  // not the second
  c.Bind({8}, {WordsOf(second)}, 16);
  c.Launch();
  EXPECT_EQ(c.outs[0]->Content(), c.outs[1]->Content());
  EXPECT_EQ(DeviceRegistry::Global().TakeFault("x"), "");
}

TEST_F(AddressKernels, RefusesWhatKernelsCannotRead) {
  Bytes pageable(64);
  const DeviceArray<uint8_t> device(pageable);
  for (const void* base : {static_cast<const void*>(pageable.data()), static_cast<const void*>(device.data())}) {
    const RegistryFault fault = DeviceRegistry::Global().Add({100, ++sequence_, kOwner}, base, 64, {0});
    EXPECT_NE(fault.step.find("not page-locked"), std::string::npos) << fault.step;
  }
  EXPECT_FALSE(DeviceRegistry::Global().Add({100, ++sequence_, kOwner}, nullptr, 0, {0}));
  const RegistryFault full = DeviceRegistry::Global().Add({kRegistryEntries, ++sequence_, kOwner}, nullptr, 0, {0});
  EXPECT_NE(full.step.find("have addresses already"), std::string::npos) << full.step;
  EXPECT_TRUE(DeviceRegistry::Global().Add({101, ++sequence_, kOwner}, nullptr, 0, {1000}));
}

// What is enqueued before a removal still reads its table.
TEST_F(AddressKernels, RemovingWaitsForWhatIsEnqueued) {
  Call c(rng_, {16});
  const Address address = Add(c.tables[0]->data(), Call::kSlots * Call::kSteps * 16);
  c.Bind({16}, {WordsOf(address)}, 16);
  GatherLaunch launch{16, nullptr, nullptr, nullptr};
  ASSERT_TRUE(DeviceRegistry::Global().View(&launch.registry));
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int i = 0; i < 200; ++i) ASSERT_CUDA(LaunchGather(c.call, launch, stream));
  ASSERT_FALSE(DeviceRegistry::Global().Remove({address}));
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  EXPECT_EQ(DeviceRegistry::Global().TakeFault("x"), "");
  EXPECT_EQ(c.outs[0]->Content(), c.outs[1]->Content());
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace gear_jax
