#include "ffi/rdma_fetch.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>

#include "ffi/copy_past_caches.h"
#include "ffi/seqlock.h"
#include "ffi/staged_gather.h"

namespace gear_jax {

using transport::Piece;
using transport::Reader;
using transport::Status;

RdmaCounters& RdmaCountersOf(int64_t reader) {
  static std::mutex* mutex = new std::mutex;  // never destroyed: fetches may be on their way when the process ends
  static auto* counters = new std::map<int64_t, RdmaCounters>;
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*counters)[reader];
}

bool WaitForFetches(const RdmaCounters& counters, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (counters.in_flight > 0) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Fetch::Fetch(FetchCall call, std::shared_ptr<Reader> reader, RdmaCounters* counters)
    : call_(std::move(call)), reader_(std::move(reader)), counters_(counters) {
  ++counters_->in_flight;
}

void Fetch::Landed() {
  if (in_flight_) --counters_->in_flight;
  in_flight_ = false;
}

std::string CheckRegion(const Reader& reader, int32_t peer, int32_t region, uint64_t wanted) {
  const uint64_t bytes = reader.RegionBytes(peer, region);
  if (bytes == wanted || (bytes == 0 && peer != reader.self())) return "";
  std::ostringstream text;
  text << "region " << region << " of process " << peer << ": got " << bytes << " bytes, wanted " << wanted
       << ". Make the same table on every process.";
  return text.str();
}

std::string CheckRegions(const FetchCall& call, const Reader& reader) {
  const GatherCall& gather = call.gather;
  const size_t columns = gather.columns.size();
  for (const RdmaShard& shard : call.shards) {
    for (size_t k = 0; k <= columns; ++k) {
      const uint64_t step_bytes = k < columns ? gather.columns[k].step_bytes * gather.steps : sizeof(uint32_t);
      const uint64_t wanted = static_cast<uint64_t>(gather.slots) * step_bytes;
      const std::string fault = CheckRegion(reader, shard.peer, shard.region + static_cast<int32_t>(k), wanted);
      if (!fault.empty()) return fault;
    }
  }
  return "";
}

std::vector<int64_t> PartBytes(const FetchCall& call) {
  std::vector<int64_t> bytes = PartBytes(call.gather);
  bytes.push_back(call.gather.rows);
  return bytes;
}

void PlaceParts(FetchCall& call, const std::vector<uint8_t*>& parts) {
  size_t i = 0;
  for (GatherColumn& column : call.gather.columns) column.out = parts[i++];
  for (GatherMask& mask : call.gather.masks) mask.out = parts[i++];
  call.valid = reinterpret_cast<bool*>(parts[i]);
}

int64_t FirstBadRow(const FetchCall& call) {
  const auto shards = static_cast<int64_t>(call.shards.size());
  for (int64_t row = 0; row < call.gather.rows; ++row) {
    const int32_t shard = call.shard[row], slot = call.gather.slot[row];
    if (slot == -1 || shard == -1) continue;
    if (shard < 0 || shard >= shards || slot < 0 || slot >= call.gather.slots) return row;
  }
  return -1;
}

bool Fetch::Inside(int64_t row) const {
  const int32_t shard = call_.shard[row], slot = call_.gather.slot[row];
  return shard >= 0 && shard < static_cast<int64_t>(call_.shards.size()) && slot >= 0 && slot < call_.gather.slots;
}

// This process's own region of a column (or, behind the columns, of the stamps); null for the rows of others.
const uint8_t* Fetch::OwnTable(int64_t row, size_t column) const {
  return own_[call_.shard[row] * (call_.gather.columns.size() + 1) + column];
}

void Fetch::Prepare(int64_t threads) {
  const GatherCall& gather = call_.gather;
  const size_t columns = gather.columns.size();
  own_.assign(call_.shards.size() * (columns + 1), nullptr);
  for (size_t d = 0; d < call_.shards.size(); ++d) {
    const RdmaShard& shard = call_.shards[d];
    if (shard.peer != reader_->self()) continue;
    for (size_t k = 0; k <= columns; ++k) {
      const int32_t region = shard.region + static_cast<int32_t>(k);
      own_[d * (columns + 1) + k] = static_cast<const uint8_t*>(reader_->OwnRegion(region));
    }
  }

  on_gpu_.assign(call_.shards.size(), false);
  for (const GpuShard& shard : call_.gpu.shards) on_gpu_[shard.shard] = true;

  rows_.assign(gather.rows, Row::kNone);
  before_.assign(gather.rows, 0);
  after_.assign(gather.rows, 0);
  int64_t row_bytes = 0;
  for (const GatherColumn& c : gather.columns) row_bytes += c.window.length * c.step_bytes;
  for (const GatherMask& m : gather.masks) row_bytes += m.window.length;
  for (int64_t row = 0; row < gather.rows; ++row) {
    if (!Inside(row)) continue;
    rows_[row] = Row::kOpen;
    if (OnGpu(row)) continue;
    if (OwnTable(row, columns) == nullptr) remote_.push_back(static_cast<int32_t>(row));
  }
  bytes_ = row_bytes * gather.rows;
  for (const GatherColumn& c : gather.columns) {
    const int64_t bytes = gather.rows * c.window.length * c.step_bytes;
    if (bytes >= (4 << 20) && call_.gpu.take == nullptr) AdviseHugePages(c.out, bytes);
  }
  const int64_t step = std::max<int64_t>(1, TaskBytes(bytes_, threads) / std::max<int64_t>(1, row_bytes));
  tasks_.clear();
  for (int64_t begin = 0; begin < gather.rows; begin += step) {
    tasks_.push_back({begin, std::min(gather.rows, begin + step)});
  }
}

void Fetch::Start(std::function<void()> ended) {
  ended_ = std::move(ended);
  counters_->rows += call_.gather.rows;
  counters_->remote += remote_.size();
  parts_.store(size() + 1, std::memory_order_relaxed);
  round_ = remote_;
  if (round_.empty()) {
    Part();
  } else {
    Ask(Phase::kBefore);
  }
}

void Fetch::Run(int64_t task) {
  for (int64_t row = tasks_[task].begin; row < tasks_[task].end; ++row) {
    if (call_.gpu.take != nullptr && (!Inside(row) || OnGpu(row))) continue;
    FillRow(row);
  }
  FencePastCaches();
  Part();
}

void Fetch::Part() {
  if (parts_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const auto ended = std::move(ended_);  // it may hold this
  ended_ = nullptr;
  Landed();
  ended();
}

// Masks, and all of the columns but what travels.
void Fetch::FillRow(int64_t row) {
  const GatherCall& gather = call_.gather;
  const bool inside = Inside(row);
  for (const GatherMask& mask : gather.masks) {
    const int64_t width = mask.window.length;
    if (width == 0) continue;
    const Visible seen = inside ? gather.RowVisible(mask.window, row) : Visible{};
    uint8_t* out = mask.out + row * width;
    std::memset(out, 0, seen.element);
    std::memset(out + seen.element, 1, seen.count);
    std::memset(out + seen.element + seen.count, 0, width - seen.element - seen.count);
  }
  for (const GatherColumn& column : gather.columns) {
    const Visible seen = inside ? gather.RowVisible(column.window, row) : Visible{};
    const int64_t end = seen.element + seen.count;
    uint8_t* out = column.out + row * column.window.length * column.step_bytes;
    if (seen.element > 0) FillPad(column, out, seen.element * column.step_bytes);
    if (end < column.window.length) {
      FillPad(column, out + end * column.step_bytes, (column.window.length - end) * column.step_bytes);
    }
  }
  if (inside && OwnTable(row, gather.columns.size()) != nullptr) FillOwnRow(row);
}

// What a stamp says of a row's bytes: kWhole, kOpen (they may become what is wanted), or kStale.
Fetch::Row Fetch::Judge(int64_t row, uint32_t stamp) const {
  if (call_.generation == nullptr) return stamp % 2 == 0 ? Row::kWhole : Row::kOpen;
  const uint32_t wanted = 2 * call_.generation[row];
  if (stamp == wanted) return Row::kWhole;
  return static_cast<int32_t>(stamp - wanted) > 0 ? Row::kStale : Row::kOpen;
}

// The same of the stamp after the bytes, which were read because the one before was whole.
Fetch::Row Fetch::JudgeAfter(int64_t row, uint32_t stamp) const {
  if (stamp == before_[row]) return Row::kWhole;
  return call_.generation == nullptr ? Row::kOpen : Judge(row, stamp);
}

// Of the one try that the kernels had.
Fetch::Row Fetch::JudgeGpuRow(int64_t row) {
  before_[row] = call_.gpu.before[row];
  Row state = Judge(row, before_[row]);
  if (state == Row::kWhole) state = JudgeAfter(row, call_.gpu.after[row]);
  return state == Row::kOpen ? Row::kTorn : state;
}

// A row of this process, which another device of it may be writing: the same protocol without the travel.
void Fetch::FillOwnRow(int64_t row) {
  const GatherCall& gather = call_.gather;
  const auto* stamp = reinterpret_cast<const uint32_t*>(OwnTable(row, gather.columns.size())) + gather.slot[row];
  Row state = Row::kOpen;
  for (int64_t tried = 0; tried < call_.tries && state == Row::kOpen; ++tried) {
    if (tried > 0) ++counters_->retries;
    before_[row] = LoadStamp(stamp);
    state = Judge(row, before_[row]);
    if (state != Row::kWhole) continue;
    for (size_t k = 0; k < gather.columns.size(); ++k) {
      const GatherColumn& column = gather.columns[k];
      const Visible seen = gather.RowVisible(column.window, row);
      if (seen.count == 0 || column.step_bytes == 0) continue;
      uint8_t* const to = column.out + (row * column.window.length + seen.element) * column.step_bytes;
      const uint8_t* const from = OwnTable(row, k) + (gather.slot[row] * gather.steps + seen.step) * column.step_bytes;
      const int64_t bytes = seen.count * column.step_bytes;
      CopyBytes(to, from, bytes, bytes_ >= kPastCachesBytes);
    }
    FenceBeforeClosing();
    state = JudgeAfter(row, LoadStamp(stamp));
  }
  rows_[row] = state == Row::kOpen ? Row::kTorn : state;
}

// Reads something of every row of the round. Rows of the round are remote, and no task touches their state.
void Fetch::Ask(Phase phase) {
  const GatherCall& gather = call_.gather;
  const size_t columns = gather.columns.size();
  std::vector<Piece> pieces;
  pieces_.clear();
  for (const int32_t row : round_) {
    const RdmaShard& shard = call_.shards[call_.shard[row]];
    const auto first = pieces.size();
    if (phase == Phase::kBytes) {
      for (size_t k = 0; k < columns; ++k) {
        const GatherColumn& column = gather.columns[k];
        const Visible seen = gather.RowVisible(column.window, row);
        if (seen.count == 0 || column.step_bytes == 0) continue;
        const int64_t step = gather.slot[row] * gather.steps + seen.step;
        pieces.push_back({shard.peer, shard.region + static_cast<int32_t>(k),
                          static_cast<uint64_t>(step * column.step_bytes),
                          static_cast<uint64_t>(seen.count * column.step_bytes),
                          column.out + (row * column.window.length + seen.element) * column.step_bytes});
      }
    } else {
      std::vector<uint32_t>& stamps = phase == Phase::kBefore ? before_ : after_;
      pieces.push_back({shard.peer, shard.region + static_cast<int32_t>(columns),
                        sizeof(uint32_t) * static_cast<uint64_t>(gather.slot[row]), sizeof(uint32_t), &stamps[row]});
    }
    pieces_.emplace_back(row, static_cast<int32_t>(pieces.size() - first));
  }
  reader_->Read(std::move(pieces),
                [self = shared_from_this(), phase](const std::vector<Status>& status) { self->Answer(phase, status); });
}

void Fetch::Answer(Phase phase, const std::vector<Status>& status) {
  std::vector<int32_t> go_on, again;
  size_t at = 0;
  for (const auto& [row, count] : pieces_) {
    Status worst = Status::kOk;
    for (int32_t i = 0; i < count; ++i, ++at) worst = status[at] == Status::kOk ? worst : status[at];
    if (worst != Status::kOk) {
      rows_[row] = worst == Status::kRefused ? Row::kRefused : Row::kLost;
      closed_ = closed_ || worst == Status::kClosed;
      const int32_t peer = call_.shards[call_.shard[row]].peer;
      if (std::find(lost_peers_.begin(), lost_peers_.end(), peer) == lost_peers_.end()) lost_peers_.push_back(peer);
      continue;
    }
    if (phase == Phase::kBytes) {
      go_on.push_back(row);
      continue;
    }
    const Row state = phase == Phase::kBefore ? Judge(row, before_[row]) : JudgeAfter(row, after_[row]);
    rows_[row] = state;
    if (state == Row::kOpen) again.push_back(row);
    if (state == Row::kWhole && phase == Phase::kBefore) go_on.push_back(row);
  }
  // Rows for another round wait until this round's others are done, behind them in one list.
  again_.insert(again_.end(), again.begin(), again.end());
  round_ = std::move(go_on);
  if (phase == Phase::kAfter || round_.empty()) {
    NextRound();
  } else {
    Ask(phase == Phase::kBefore ? Phase::kBytes : Phase::kAfter);
  }
}

void Fetch::NextRound() {
  round_ = std::move(again_);
  again_.clear();
  if (round_.empty()) {
    Part();
    return;
  }
  if (++tries_ >= call_.tries) {
    for (const int32_t row : round_) rows_[row] = Row::kTorn;
    Part();
    return;
  }
  counters_->retries += round_.size();
  Ask(Phase::kBefore);
}

void Fetch::PadRow(int64_t row) {
  for (const GatherColumn& column : call_.gather.columns) {
    const int64_t bytes = column.window.length * column.step_bytes;
    if (bytes > 0) FillPad(column, column.out + row * bytes, bytes);
  }
  for (const GatherMask& mask : call_.gather.masks) {
    if (mask.window.length > 0) std::memset(mask.out + row * mask.window.length, 0, mask.window.length);
  }
}

void Fetch::Finish() {
  const GpuRows& gpu = call_.gpu;
  for (int64_t row = 0; row < call_.gather.rows; ++row) {
    bool by_gpu = false;
    if (OnGpu(row)) {
      rows_[row] = JudgeGpuRow(row);
      by_gpu = rows_[row] == Row::kWhole;
      // What writes the shard of another GPU does not wait for these kernels: the other tries are the host's.
      if (rows_[row] == Row::kTorn && OwnTable(row, call_.gather.columns.size()) != nullptr) FillRow(row);
    }
    const Row state = rows_[row];
    const bool whole = state == Row::kWhole;
    call_.valid[row] = whole;
    if (gpu.take != nullptr) gpu.take[row] = state != Row::kNone && !by_gpu;
    if (whole || state == Row::kNone) continue;
    PadRow(row);
    if (state == Row::kTorn) ++counters_->torn;
    if (state == Row::kStale) ++counters_->stale;
    if (state == Row::kLost) ++counters_->lost;
    if (state == Row::kRefused) ++counters_->refused;
  }
  FencePastCaches();
}

}  // namespace gear_jax
