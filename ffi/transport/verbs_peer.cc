#if __has_include(<infiniband/verbs.h>)

#include "ffi/transport/verbs_peer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "ffi/transport/error_text.h"

namespace gear_jax::transport {
namespace {

// Of a call that sets errno or returns it.
std::string CallError(const std::string& call, int error, const std::string& fix) {
  return ErrorText("verbs: " + call, std::strerror(error), "success", fix);
}

constexpr char kSameVersion[] = "The peer must run the same version of gear_jax with the same options.";
constexpr char kSeeDoctor[] = "`python -m gear_jax doctor` shows the device's limits and addresses.";

uint32_t RandomPsn() {
  std::random_device random;
  return random() & 0xffffff;
}

}  // namespace

VerbsPeer::~VerbsPeer() {
  Destroy(&pairs_);
  Destroy(&next_);
  if (registration_ != nullptr) context_->library->dereg_mr(registration_);
  if (staging_ != nullptr) munmap(staging_, staging_bytes_);
}

// One registration for all queue pairs and all connections of the peer.
std::string VerbsPeer::Register() {
  if (registration_ != nullptr) return "";
  const uint64_t chunk = (context_->chunk + StagingRing::kAlign - 1) / StagingRing::kAlign * StagingRing::kAlign;
  const uint64_t chunks = (context_->in_flight / context_->chunk + context_->queue_pairs - 1) / context_->queue_pairs;
  pair_bytes_ = chunk * std::max<uint64_t>(chunks, 1);
  staging_bytes_ = pair_bytes_ * context_->queue_pairs;
  void* memory = mmap(nullptr, staging_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CallError("mmap of staging memory", errno, "Set a smaller chunk or window.");
  madvise(memory, staging_bytes_, MADV_DONTFORK);  // a child's copy would take the pages away from the device
  ibv_mr* registration = context_->library->reg_mr(context_->domain, memory, staging_bytes_, IBV_ACCESS_LOCAL_WRITE);
  if (registration == nullptr) {
    const int error = errno;
    munmap(memory, staging_bytes_);
    return CallError("registration of " + std::to_string(staging_bytes_) + " bytes of staging memory", error,
                     "Raise the limit on locked memory (`ulimit -l unlimited`), or set a smaller chunk or window.");
  }
  staging_ = memory;
  registration_ = registration;
  return "";
}

std::string VerbsPeer::CreateQueuePair(uint32_t index) {
  auto pair = std::make_unique<QueuePair>(index * pair_bytes_, pair_bytes_);
  ibv_qp_init_attr init = {};
  init.send_cq = init.recv_cq = context_->completions;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = context_->reads;
  init.cap.max_recv_wr = 1;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  pair->qp = context_->library->create_qp(context_->domain, &init);
  if (pair->qp == nullptr) return CallError("making a queue pair", errno, kSeeDoctor);
  pair->psn = RandomPsn();
  ibv_qp* qp = pair->qp;
  next_.push_back(std::move(pair));
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = context_->device.port;
  attributes.qp_access_flags = 0;  // nobody may touch this side's memory
  const int error = context_->library->modify_qp(qp, &attributes,
                                                 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  return error == 0 ? "" : CallError("queue pair to INIT", error, kSeeDoctor);
}

std::string VerbsPeer::Prepare(VerbsEnd* mine) {
  Destroy(&next_);
  std::string error = Register();
  for (uint32_t i = 0; i < context_->queue_pairs && error.empty(); ++i) error = CreateQueuePair(i);
  if (!error.empty()) {
    Destroy(&next_);
    return error;
  }
  const VerbsDevice& device = context_->device;
  mine->link = device.link;
  mine->mtu = device.mtu;
  mine->lid = device.lid;
  mine->gid = device.gid;
  mine->reads = static_cast<uint8_t>(context_->reads);
  for (const auto& pair : next_) mine->queue_pairs.push_back({pair->qp->qp_num, pair->psn});
  return "";
}

std::string VerbsPeer::ToReady(const QueuePair& pair, const VerbsEnd& theirs, const QueuePairEnd& end) {
  const VerbsDevice& device = context_->device;
  const Options& options = context_->options;
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = MtuValue(std::min(device.mtu, theirs.mtu));
  attributes.dest_qp_num = end.number;
  attributes.rq_psn = end.psn;
  attributes.max_dest_rd_atomic = 0;  // the peer reads nothing here
  attributes.min_rnr_timer = 12;
  attributes.ah_attr.port_num = device.port;
  attributes.ah_attr.dlid = theirs.lid;
  if (device.gid_index >= 0 && theirs.has_gid()) {
    attributes.ah_attr.is_global = 1;
    std::copy(theirs.gid.begin(), theirs.gid.end(), attributes.ah_attr.grh.dgid.raw);
    attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(device.gid_index);
    attributes.ah_attr.grh.hop_limit = 64;
    attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(options.traffic_class);
  }
  int error = context_->library->modify_qp(pair.qp, &attributes,
                                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) {
    return CallError("queue pair to RTR", error, "The peer's GID must be reachable from this one's: choose gid_index.");
  }
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = pair.psn;
  attributes.timeout = static_cast<uint8_t>(options.ack_timeout);
  attributes.retry_cnt = static_cast<uint8_t>(options.retries);
  attributes.rnr_retry = 7;
  attributes.max_rd_atomic = static_cast<uint8_t>(reads_);
  error = context_->library->modify_qp(
      pair.qp, &attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  return error == 0 ? "" : CallError("queue pair to RTS", error, kSeeDoctor);
}

std::string VerbsPeer::TakeRegions(const std::vector<RemoteRegion>& regions) {
  regions_.clear();
  for (const RemoteRegion& region : regions) {
    uint32_t key = 0;
    if (!DecodeRemoteKey(region.key, &key)) {
      return ErrorText("verbs connection: bytes of a region's key", region.key.size(), 4, kSameVersion);
    }
    if (region.bytes > ~uint64_t{0} - region.address) {
      return ErrorText("verbs connection: bytes of a region", region.bytes, "an end below 2^64", kSameVersion);
    }
    regions_.push_back({region.address, region.bytes, key});
  }
  return "";
}

std::string VerbsPeer::Connect(const VerbsEnd& theirs, std::vector<RemoteRegion> regions, uint32_t* serial) {
  std::string error;
  if (theirs.queue_pairs.size() != next_.size()) {
    error = ErrorText("verbs connection: queue pairs", theirs.queue_pairs.size(), next_.size(), kSameVersion);
  } else if (theirs.link != context_->device.link) {
    error = ErrorText("verbs connection", "InfiniBand on one side and Ethernet on the other", "the same on both",
                      "Name the devices: device=.");
  } else {
    error = TakeRegions(regions);
  }
  reads_ = std::min<uint32_t>(context_->reads, theirs.reads);
  for (size_t i = 0; i < next_.size() && error.empty(); ++i) {
    error = ToReady(*next_[i], theirs, theirs.queue_pairs[i]);
    next_[i]->serial = (*serial)++;
  }
  if (!error.empty()) {
    Destroy(&next_);
    return error;
  }
  pairs_ = std::move(next_);
  next_.clear();
  connected_ = true;
  return "";
}

void VerbsPeer::Destroy(QueuePairs* pairs) {
  for (const auto& pair : *pairs) {
    if (pair->qp != nullptr) context_->library->destroy_qp(pair->qp);
  }
  pairs->clear();
}

void VerbsPeer::Drop(std::vector<Completion>* ended) {
  for (const auto& pair : pairs_) {
    for (const UnderWay& read : pair->under_way) ended->push_back({read.cookie, Status::kLost});
  }
  Destroy(&pairs_);
  under_way_ = bytes_under_way_ = 0;
  connected_ = spent_ = false;
}

bool VerbsPeer::Post(int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) {
  if (under_way_ >= context_->window || bytes_under_way_ + bytes > context_->in_flight) return false;
  const auto emptier = [](const auto& a, const auto& b) { return a->under_way.size() < b->under_way.size(); };
  QueuePair& pair = **std::min_element(pairs_.begin(), pairs_.end(), emptier);
  if (pair.under_way.size() >= reads_) return false;
  const uint64_t at = pair.ring.Take(bytes);
  if (at == StagingRing::kNone) return false;
  const Region& from = regions_[region];
  ibv_sge piece = {};
  piece.addr = reinterpret_cast<uint64_t>(staging_) + pair.base + at;
  piece.length = bytes;
  piece.lkey = registration_->lkey;
  ibv_send_wr request = {};
  ibv_send_wr* bad = nullptr;
  request.wr_id = uint64_t{pair.serial} << 32 | pair.sequence;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = from.address + offset;
  request.wr.rdma.rkey = from.key;
  pair.under_way.push_back({cookie, to, pair.base + at, bytes, pair.sequence++});
  if (ibv_post_send(pair.qp, &request, &bad) != 0) {
    pair.under_way.pop_back();
    spent_ = true;  // the ring has lost its place; the caller tells of the read
    return false;
  }
  bytes_under_way_ += bytes;
  ++under_way_;
  return true;
}

bool VerbsPeer::Complete(size_t index, const ibv_wc& wc, Completion* completion) {
  QueuePair& pair = *pairs_[index];
  const auto sequence = static_cast<uint32_t>(wc.wr_id);
  if (pair.under_way.empty() || pair.under_way.front().sequence != sequence) {
    spent_ = true;  // a device that answers what nobody asked
    return false;
  }
  const UnderWay read = pair.under_way.front();
  pair.under_way.pop_front();
  bytes_under_way_ -= read.bytes;
  --under_way_;
  Status status = Status::kOk;
  if (wc.status == IBV_WC_SUCCESS) {
    std::memcpy(read.to, static_cast<const uint8_t*>(staging_) + read.at, read.bytes);
  } else {
    spent_ = true;
    // The peer's refusals; else it did not answer, or an earlier error of the queue pair took this one along.
    const bool refused = wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_INV_REQ_ERR;
    status = refused ? Status::kRefused : Status::kLost;
  }
  pair.ring.Give();
  *completion = {read.cookie, status};
  return true;
}

}  // namespace gear_jax::transport

#endif  // __has_include(<infiniband/verbs.h>)
