#include "ffi/transport/session_loop.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gear_jax::transport {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint32_t kWindow = 256;       // chunks, and
constexpr uint64_t kWindowChunks = 16;  // full ones
constexpr size_t kPolled = 64;
constexpr int kPostsInTurn = 64;
constexpr auto kSpin = std::chrono::microseconds(20);  // before the thread sleeps while something is under way
constexpr double kIdleSeconds = 60;
constexpr double kUnsureSeconds = 1e-3;                  // where a transport has no room, or a late read has yet to end
constexpr auto kDrain = std::chrono::milliseconds(500);  // that what is under way has to end by itself, at the end

}  // namespace

SessionLoop::SessionLoop(std::unique_ptr<Transport> transport, int32_t self_, int32_t peers_,
                         std::vector<OwnMemory> own_, const Options& options)
    : self(self_),
      peers(peers_),
      own(std::move(own_)),
      transport_(std::move(transport)),
      timeout_(static_cast<int64_t>(options.timeout * 1e9)),
      chunk_bytes_(std::max<uint64_t>(1, std::min<uint64_t>({options.chunk == 0 ? kChunkBytes : options.chunk,
                                                             transport_->capabilities().max_read, UINT32_MAX}))),
      window_(options.window == 0 ? kWindow : options.window),
      window_bytes_(chunk_bytes_ * (options.window == 0 ? kWindowChunks : options.window)),
      state_(static_cast<size_t>(peers_)),
      completions_(kPolled),
      region_bytes_(static_cast<size_t>(peers_)),
      near_(static_cast<size_t>(peers_)),
      alive_(static_cast<size_t>(peers_)) {
  for (auto& alive : alive_) alive = false;
  auto& mine = region_bytes_[static_cast<size_t>(self)];
  for (const OwnMemory& region : own) mine.push_back(region.bytes);
  alive_[static_cast<size_t>(self)] = true;
}

SessionLoop::~SessionLoop() {
  if (thread_.joinable()) thread_.detach();  // the last reference was the thread's own
}

void SessionLoop::Start(const std::shared_ptr<SessionLoop>& loop) {
  const std::lock_guard<std::mutex> lock(loop->join_);
  loop->thread_ = std::thread([loop]() {
    loop->thread_id_ = std::this_thread::get_id();
    loop->Loop();
  });
}

void SessionLoop::Loop() {
  while (TakeWork()) {
    const bool posted = PostTurn();
    const bool polled = Poll();
    Expire();
    const bool finished = !finished_.empty();
    RunDone();
    if (posted || polled || finished) {
      progressed_ = Clock::now();
    } else {
      Sleep();
    }
  }
  ShutDown();
}

bool SessionLoop::TakeWork() {
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<Command*> commands;
  bool closing;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    batches.swap(inbox_);
    commands.swap(commands_);
    closing = closing_;
  }
  for (auto& batch : batches) Admit(std::move(batch));
  for (Command* command : commands) {
    if (!closing) (*command->f)(*transport_);
    const std::lock_guard<std::mutex> lock(mutex_);
    command->ran = !closing;
    command->ended = true;
    changed_.notify_all();
  }
  return !closing;
}

Status SessionLoop::Check(const Piece& piece) const {
  if (piece.peer < 0 || piece.peer >= peers) return Status::kRefused;
  const auto peer = static_cast<size_t>(piece.peer);
  if (piece.peer != self && !state_[peer].connected) return Status::kLost;
  const auto& regions = region_bytes_[peer];  // written by this thread only
  if (piece.region < 0 || static_cast<size_t>(piece.region) >= regions.size()) return Status::kRefused;
  const uint64_t bytes = regions[static_cast<size_t>(piece.region)];
  if (piece.offset > bytes || piece.bytes > bytes - piece.offset) return Status::kRefused;
  return Status::kOk;
}

void SessionLoop::Admit(std::unique_ptr<Batch> owned) {
  Batch* batch = owned.get();
  batches_.push_back(std::move(owned));
  if (batch->left == 0) {
    finished_.push_back(std::move(batches_.back()));
    batches_.pop_back();
    return;
  }
  for (size_t i = 0; i < batch->pieces.size(); ++i) {
    const Piece& piece = batch->pieces[i];
    PieceState& state = batch->states[i];
    if (piece.peer != self) ++reads_;
    state.status = Check(piece);
    if (state.status == Status::kOk && state.unasked > 0) {
      state_[static_cast<size_t>(piece.peer)].waiting.push_back({batch, static_cast<uint32_t>(i)});
      ++waiting_;
    } else {
      state.unasked = 0;
      EndIfWhole(batch, static_cast<uint32_t>(i));
    }
  }
}

// Peers take turns, a chunk each.
bool SessionLoop::PostTurn() {
  int posted = 0;
  bool any = waiting_ > 0;
  while (any && posted < kPostsInTurn) {
    any = false;
    for (int32_t i = 0; i < peers; ++i) {
      const int32_t peer = (turn_ + i) % peers;
      if (!state_[static_cast<size_t>(peer)].waiting.empty() && PostChunk(peer)) {
        any = true;
        ++posted;
      }
    }
    turn_ = (turn_ + 1) % peers;
  }
  return posted > 0;
}

bool SessionLoop::PostChunk(int32_t peer) {
  Peer& to = state_[static_cast<size_t>(peer)];
  if (to.under_way >= window_ || to.bytes_under_way >= window_bytes_) return false;
  const Waiting waiting = to.waiting.front();
  const Piece& piece = waiting.batch->pieces[waiting.piece];
  PieceState& state = waiting.batch->states[waiting.piece];
  const auto bytes = static_cast<uint32_t>(std::min(state.unasked, chunk_bytes_));
  const uint64_t asked = piece.bytes - state.unasked;
  uint8_t* const target = static_cast<uint8_t*>(piece.to) + asked;
  if (peer == self) {
    const auto* region = static_cast<const uint8_t*>(own[static_cast<size_t>(piece.region)].data);
    std::memcpy(target, region + piece.offset + asked, bytes);
  } else {
    if (free_chunks_.empty()) {
      free_chunks_.push_back(static_cast<uint32_t>(chunks_.size()));
      chunks_.emplace_back();
    }
    const uint32_t slot = free_chunks_.back();
    Chunk& chunk = chunks_[slot];
    const uint64_t cookie = static_cast<uint64_t>(chunk.generation) << 32 | slot;
    if (!transport_->Post(peer, piece.region, piece.offset + asked, bytes, target, cookie)) return false;
    free_chunks_.pop_back();
    chunk.batch = waiting.batch;
    chunk.piece = waiting.piece;
    chunk.bytes = bytes;
    to.bytes_under_way += bytes;
    ++state.under_way;
    ++to.under_way;
    ++under_way_;
  }
  state.unasked -= bytes;
  if (state.unasked == 0) {
    to.waiting.pop_front();
    --waiting_;
    EndIfWhole(waiting.batch, waiting.piece);
  }
  return true;
}

bool SessionLoop::Poll() {
  const size_t count = transport_->Poll(completions_.data(), completions_.size());
  for (size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<uint32_t>(completions_[i].cookie);
    if (slot >= chunks_.size()) continue;
    Chunk& chunk = chunks_[slot];
    if (chunk.batch == nullptr || chunk.generation != completions_[i].cookie >> 32) continue;
    Batch* const batch = chunk.batch;
    state_[static_cast<size_t>(batch->pieces[chunk.piece].peer)].bytes_under_way -= chunk.bytes;
    chunk.batch = nullptr;
    ++chunk.generation;
    free_chunks_.push_back(slot);
    ChunkEnded(batch, chunk.piece, completions_[i].status);
  }
  return count > 0;
}

void SessionLoop::ChunkEnded(Batch* batch, uint32_t piece, Status status) {
  const int32_t peer = batch->pieces[piece].peer;
  PieceState& state = batch->states[piece];
  Peer& from = state_[static_cast<size_t>(peer)];
  --state.under_way;
  --from.under_way;
  --under_way_;
  if (status != Status::kOk && state.status == Status::kOk) {
    state.status = status == Status::kClosed ? Status::kLost : status;
    if (state.unasked > 0) {  // then it is the first that waits
      state.unasked = 0;
      from.waiting.pop_front();
      --waiting_;
    }
    // This batch may end here, but goes on living in finished_.
    if (status != Status::kRefused) Fail(peer, Status::kLost, nullptr);
  }
  EndIfWhole(batch, piece);
}

void SessionLoop::EndIfWhole(Batch* batch, uint32_t piece) {
  PieceState& state = batch->states[piece];
  if (state.ended || state.under_way > 0 || state.unasked > 0) return;
  state.ended = true;
  if (batch->pieces[piece].peer != self) {
    if (state.status == Status::kOk) bytes_ += batch->pieces[piece].bytes;
    if (state.status == Status::kRefused) ++refused_;
    if (state.status == Status::kTimeout) ++timeouts_;
    if (state.status == Status::kLost) ++lost_;
  }
  if (--batch->left > 0) return;
  const auto place = std::find_if(batches_.begin(), batches_.end(), [&](const auto& b) { return b.get() == batch; });
  finished_.push_back(std::move(*place));
  batches_.erase(place);
}

// All that a peer owes ends with `status`; what `late` wants of it, with kTimeout.
void SessionLoop::Fail(int32_t peer, Status status, const Batch* late) {
  Peer& from = state_[static_cast<size_t>(peer)];
  alive_[static_cast<size_t>(peer)] = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    near_[static_cast<size_t>(peer)] = nullptr;
  }
  waiting_ -= from.waiting.size();
  from.waiting.clear();
  if (from.connected) {
    from.connected = false;
    ++losses_;
    transport_->Disconnect(peer);
  }
  for (auto next = batches_.begin(); next != batches_.end();) {
    Batch* const batch = (next++)->get();  // it may end
    for (size_t i = 0, pieces = batch->pieces.size(); i < pieces; ++i) {
      PieceState& state = batch->states[i];
      if (batch->pieces[i].peer != peer || state.ended) continue;
      if (state.status == Status::kOk) state.status = batch == late ? Status::kTimeout : status;
      state.unasked = 0;
      EndIfWhole(batch, static_cast<uint32_t>(i));
    }
  }
}

void SessionLoop::Expire() {
  const auto now = Clock::now();
  for (auto next = batches_.begin(); next != batches_.end() && (*next)->deadline <= now;) {
    Batch* const batch = next->get();
    if (batch->expired) {
      ++next;
      continue;
    }
    batch->expired = true;
    std::vector<int32_t> owing;
    for (size_t i = 0; i < batch->pieces.size(); ++i) {
      const int32_t peer = batch->pieces[i].peer;
      if (!batch->states[i].ended && peer != self && state_[static_cast<size_t>(peer)].connected) owing.push_back(peer);
    }
    for (const int32_t peer : owing) {
      if (state_[static_cast<size_t>(peer)].connected) Fail(peer, Status::kLost, batch);
    }
    next = batches_.begin();  // any may have ended
  }
}

void SessionLoop::RunDone() {
  std::vector<Status> states;
  std::vector<std::unique_ptr<Batch>> finished;
  finished.swap(finished_);
  for (auto& batch : finished) {
    states.clear();
    for (const PieceState& state : batch->states) states.push_back(state.status);
    wait_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - batch->start).count();
    batch->done(states);
    batch.reset();  // with what `done` holds
  }
}

void SessionLoop::Sleep() {
  const auto now = Clock::now();
  if (under_way_ > 0 && now - progressed_ < kSpin) return;
  double seconds = kIdleSeconds;
  if (waiting_ > 0 && under_way_ == 0) seconds = kUnsureSeconds;
  for (const auto& batch : batches_) {
    if (batch->expired) {
      seconds = kUnsureSeconds;
    } else {
      seconds = std::min(seconds, std::chrono::duration<double>(batch->deadline - now).count());
      break;
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || !inbox_.empty() || !commands_.empty()) return;
    sleeping_ = true;
  }
  transport_->Wait(std::max(seconds, 0.0));
  const std::lock_guard<std::mutex> lock(mutex_);
  sleeping_ = false;
}

void SessionLoop::ShutDown() {
  TakeWork();  // nothing comes after: the lock was taken since closing_ was set
  // A peer over UCX that still answers when the connection is forced to end may not survive it.
  const auto until = Clock::now() + kDrain;
  while (under_way_ > 0 && Clock::now() < until) {
    if (!Poll()) transport_->Wait(kUnsureSeconds);
  }
  for (int32_t peer = 0; peer < peers; ++peer) Fail(peer, Status::kClosed, nullptr);
  const auto last = Clock::now() + std::max<std::chrono::nanoseconds>(timeout_, kDrain);
  while (under_way_ > 0 && Clock::now() < last) {
    if (!Poll()) transport_->Wait(kUnsureSeconds);
  }
  const uint64_t unended = under_way_;
  Abandon();
  RunDone();
  std::unique_ptr<Transport> transport;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    transport = std::move(transport_);
  }
  transport.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  unended_ = unended;
  changed_.notify_all();
}

// A transport that has not ended what it was told to end is polled no more, so it writes to no memory either.
void SessionLoop::Abandon() {
  for (auto next = batches_.begin(); next != batches_.end();) {
    Batch* const batch = (next++)->get();  // it ends
    for (uint32_t i = 0; i < batch->pieces.size(); ++i) {
      batch->states[i].under_way = 0;
      EndIfWhole(batch, i);
    }
  }
}

}  // namespace gear_jax::transport
