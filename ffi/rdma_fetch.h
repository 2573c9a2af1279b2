// rdma_fetch: windows of rows out of the tables of a job's processes, with padding and masks. The core, without XLA.
#ifndef GEAR_JAX_FFI_RDMA_FETCH_H_
#define GEAR_JAX_FFI_RDMA_FETCH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/gather.h"
#include "ffi/parallel.h"
#include "ffi/transport/reader.h"

namespace gear_jax {

// A part of a table as its peer exposes it: one region for each column, from `region` on, then the stamps.
struct RdmaShard {
  int32_t peer;
  int32_t region;
};

// What has happened to the rows that were asked for, over all fetches of one reader.
struct RdmaCounters {
  std::atomic<uint64_t> rows{0};      // asked for
  std::atomic<uint64_t> remote{0};    // of them, from another process
  std::atomic<uint64_t> retries{0};   // rows that were read once more
  std::atomic<uint64_t> torn{0};      // rows that were being written until the last try
  std::atomic<uint64_t> stale{0};     // rows whose slot holds another trajectory by now
  std::atomic<uint64_t> lost{0};      // rows of a peer that is gone, or did not answer in time
  std::atomic<uint64_t> refused{0};   // rows that the peer did not let be read, or whose memory is gone
  std::atomic<int64_t> in_flight{0};  // fetches that want something of the reader, or will
};

// The counters of a reader, by its number; there from the first call on. Thread-safe.
RdmaCounters& RdmaCountersOf(int64_t reader);

// Waits until none of its fetches is in flight, at most so long; whether that is so. For who ends the reader.
bool WaitForFetches(const RdmaCounters& counters, double seconds);

// A shard of this process whose tables a GPU can read where they are.
struct GpuShard {
  int32_t shard;
  std::vector<const uint8_t*> tables;  // of each column
  const uint32_t* stamp;               // [slots]
};

// Of a fetch by a GPU: its kernels gather the rows of some shards. They bring the stamps of these rows from before and
// after their bytes were read. The fetch gets all others into the host memory that the call's results are in then, and
// `take` says which rows of it count: the others are the kernels' own.
struct GpuRows {
  std::vector<GpuShard> shards;
  const uint32_t* before = nullptr;  // [rows]
  const uint32_t* after = nullptr;   // [rows]
  uint8_t* take = nullptr;           // [rows], 0 or 1; null: no GPU
};

// Row b shows steps of `gather.slot[b]` of shard[b], as a gather does of a table, if the slot's stamp is
// 2 * generation[b] before its bytes are read and after; else it is padding throughout, and not valid. Rows with a
// shard or slot that there is not are padding, too. `gather.slots` and tables are those of one shard; tables are not
// used: each column's memory is a region.
struct FetchCall {
  GatherCall gather;
  const int32_t* shard = nullptr;        // [rows]
  const uint32_t* generation = nullptr;  // [rows]; null: whichever is there, if it is whole
  bool* valid = nullptr;                 // [rows]
  std::vector<RdmaShard> shards;
  int64_t tries = 1;  // how often a row is read that may still become whole
  GpuRows gpu;
};

// "" or that a region of a peer has not as many bytes as are wanted. Of a peer that is lost nothing may be known.
std::string CheckRegion(const transport::Reader& reader, int32_t peer, int32_t region, uint64_t wanted);

// "" or what regions do not fit the call.
std::string CheckRegions(const FetchCall& call, const transport::Reader& reader);

// Bytes of each part of a fetch's data: the columns', the masks', then which rows are valid.
std::vector<int64_t> PartBytes(const FetchCall& call);

// Points a fetch's results to memory, by part.
void PlaceParts(FetchCall& call, const std::vector<uint8_t*>& parts);

// The first row of a shard or slot that there is not, but for -1; -1: none.
int64_t FirstBadRow(const FetchCall& call);

// A fetch. Its tasks fill in padding and masks and gather the rows of this process's own regions where they lie, while
// the rows of others travel.
class Fetch : public Work, public std::enable_shared_from_this<Fetch> {
 public:
  // In flight from now on until it has ended.
  Fetch(FetchCall call, std::shared_ptr<transport::Reader> reader, RdmaCounters* counters);
  ~Fetch() override { Landed(); }

  // Sorts the rows and fixes the split into tasks. CheckRegions must have found no fault. Call once, first.
  void Prepare(int64_t threads);

  // Bytes that the tasks write.
  int64_t bytes() const { return bytes_; }
  // Whether some rows travel, so that the end may come from the reader's thread.
  bool travels() const { return !remote_.empty(); }

  // Asks for the rows that travel. `ended` runs once, when all tasks have run and nothing travels any more; on the
  // thread that came last. It must not block; what is left to do is Finish. Call once, before the tasks run.
  void Start(std::function<void()> ended);

  int64_t size() const override { return static_cast<int64_t>(tasks_.size()); }
  void Run(int64_t task) override;

  // Ends the rows that are not whole, as padding. Call once, after `ended`, on any thread.
  void Finish();

  // After Finish: the peers that did not answer, and whether the reader was closed meanwhile.
  const std::vector<int32_t>& lost_peers() const { return lost_peers_; }
  bool closed() const { return closed_; }

 private:
  enum class Row : uint8_t { kNone, kOpen, kWhole, kTorn, kStale, kLost, kRefused };
  enum class Phase { kBefore, kBytes, kAfter };

  struct Task {
    int64_t begin, end;  // rows
  };

  bool Inside(int64_t row) const;
  bool OnGpu(int64_t row) const { return Inside(row) && on_gpu_[call_.shard[row]]; }
  const uint8_t* OwnTable(int64_t row, size_t column) const;
  Row Judge(int64_t row, uint32_t stamp) const;
  Row JudgeAfter(int64_t row, uint32_t stamp) const;
  void FillRow(int64_t row);
  Row JudgeGpuRow(int64_t row);
  void FillOwnRow(int64_t row);
  void PadRow(int64_t row);
  void Ask(Phase phase);
  void Answer(Phase phase, const std::vector<transport::Status>& status);
  void NextRound();
  void Part();
  void Landed();

  FetchCall call_;
  std::shared_ptr<transport::Reader> reader_;
  RdmaCounters* counters_;
  int64_t bytes_ = 0;
  std::vector<Task> tasks_;
  std::vector<Row> rows_;
  std::vector<uint32_t> before_, after_;  // stamps, by row
  std::vector<const uint8_t*> own_;       // [shards, columns + 1], this process's own regions
  std::vector<bool> on_gpu_;              // [shards]
  std::vector<int32_t> remote_;           // rows that travel
  // Of the round under way; touched by one thread at a time, the one that the reader answers on.
  std::vector<int32_t> round_, again_;
  std::vector<std::pair<int32_t, int32_t>> pieces_;  // rows of the pieces, with the number of their pieces
  int64_t tries_ = 0;
  std::atomic<int64_t> parts_{0};  // tasks that have not run, and one for what travels
  std::function<void()> ended_;
  bool in_flight_ = true;
  std::vector<int32_t> lost_peers_;
  bool closed_ = false;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_RDMA_FETCH_H_
