// A Reader for tests: memory of this process, with faults, delays, and a thread that answers.
#ifndef GEAR_JAX_FFI_TESTS_FAKE_READER_H_
#define GEAR_JAX_FFI_TESTS_FAKE_READER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/seqlock.h"
#include "ffi/transport/memory_reader.h"
#include "ffi/transport/reader.h"

namespace gear_jax {

class FakeReader : public transport::Reader {
 public:
  FakeReader(int32_t self, std::vector<std::vector<transport::MemoryRegion>> regions)
      : self_(self), regions_(std::move(regions)) {}
  ~FakeReader() override {
    {
      const std::lock_guard<std::mutex> lock(asked_->mutex);
      asked_->closed = true;
      asked_->changed.notify_all();
    }
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // its `done` held the last reference
    } else if (thread_.joinable()) {
      thread_.join();
    }
  }

  // Called before each piece is copied: what becomes of it. On the thread that answers, one piece after another.
  std::function<transport::Status(const transport::Piece&)> on_piece;
  std::chrono::milliseconds delay{0};
  bool at_once = false;  // `done` runs before Read returns

  int reads() const { return reads_; }

  void Read(std::vector<transport::Piece> pieces, Done done) override {
    ++reads_;
    auto answer = [this, pieces = std::move(pieces), done = std::move(done)] {
      std::this_thread::sleep_for(delay);
      std::vector<transport::Status> status;
      for (const transport::Piece& piece : pieces) {
        const transport::Status ended = on_piece ? on_piece(piece) : transport::Status::kOk;
        if (ended == transport::Status::kOk) Copy(piece);
        status.push_back(ended);
      }
      done(status);
    };
    if (at_once) {
      answer();
      return;
    }
    const std::lock_guard<std::mutex> lock(asked_->mutex);
    asked_->answers.push_back(std::move(answer));
    asked_->changed.notify_all();
    if (!thread_.joinable()) thread_ = std::thread(&FakeReader::Loop, asked_);
  }

  bool Alive(int32_t) const override { return true; }
  int32_t self() const override { return self_; }
  int32_t peers() const override { return static_cast<int32_t>(regions_.size()); }
  uint64_t RegionBytes(int32_t peer, int32_t region) const override { return regions_[peer].at(region).bytes; }
  const void* OwnRegion(int32_t region) const override { return regions_[self_].at(region).data; }

 private:
  // What has been asked. The thread may outlive the reader.
  struct Asked {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> answers;
    bool closed = false;
  };

  static void Loop(std::shared_ptr<Asked> asked) {
    std::unique_lock<std::mutex> lock(asked->mutex);
    while (true) {
      asked->changed.wait(lock, [&] { return asked->closed || !asked->answers.empty(); });
      if (asked->answers.empty()) return;
      std::function<void()> answer = std::move(asked->answers.front());
      asked->answers.pop_front();
      lock.unlock();
      answer();
      answer = nullptr;  // it may hold the reader
      lock.lock();
    }
  }

  // As a network card does: nobody who checks the program knows of it. Stamps, which are four bytes, are in order with
  // what was read before.
  __attribute__((noinline, no_sanitize("thread"))) void Copy(const transport::Piece& piece) const {
    const auto* from = static_cast<const uint8_t*>(regions_[piece.peer].at(piece.region).data) + piece.offset;
    auto* to = static_cast<uint8_t*>(piece.to);
    if (piece.bytes == 4) {
      FenceBeforeClosing();
      const uint32_t stamp = LoadStamp(reinterpret_cast<const uint32_t*>(from));
      for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(stamp >> (8 * i));
      return;
    }
    const volatile uint8_t* at = from;
    for (uint64_t i = 0; i < piece.bytes; ++i) to[i] = at[i];
  }

  const int32_t self_;
  const std::vector<std::vector<transport::MemoryRegion>> regions_;
  std::atomic<int> reads_{0};
  const std::shared_ptr<Asked> asked_ = std::make_shared<Asked>();
  std::thread thread_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_TESTS_FAKE_READER_H_
