// Package recorder keeps what happened to devices in a fixed amount of memory: every
// connection in one record, details of failures, and the steps of calls. It is on before
// something fails, and answers why it did.
//
// Devices are divided into shards by a hash, each with rings of bytes under its own mutex:
// one for steps, one for steps that proved nothing, one for calls that failed or were slow,
// one for other calls, so that failures outlive successes. A device that exceeds its rate
// has its steps combined and its calls dropped, so that it drives out nobody's records.
// Whoever only knows the id of a device spends a rate of their own, and drives out none of
// its records. Nothing is kept in a session, and devices without records cost nothing.
package recorder

import (
	"encoding/binary"
	"hash/maphash"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// MinMemory is the least memory of a Recorder in bytes.
const MinMemory = 1 << 20

const (
	shardBits = 4
	shards    = 1 << shardBits
	// maxRefusals is how many steps of unknown devices are kept.
	maxRefusals = 256
	// SlowCall is from when a call counts as slow.
	SlowCall = 5 * time.Second
)

// The rate of one device: a burst, then one more in stepPause and callPause seconds.
const (
	stepBurst = 64
	stepPause = 10
	callBurst = 1024
	callPause = 1
)

// maxCombine is how far back a step looks for an equal one.
const maxCombine = 8

// Recorder is a devices.Recorder. It is safe for concurrent use.
type Recorder struct {
	node    string
	started time.Time
	seed    maphash.Seed
	shards  [shards]shard

	refusalsMu sync.Mutex
	refusals   []devices.Step     // of unknown devices, oldest first
	refusedBy  map[netip.Addr]int // how many of them each address has, IPv6 by its /64 network

	// Memory is how many bytes are allocated.
	Memory atomic.Int64
	// Records counts records, Combined steps beyond the rate of their device that were
	// combined with an earlier one, Dropped calls beyond it.
	Records, Combined, Dropped atomic.Uint64
}

type shard struct {
	mu     sync.Mutex
	index  index
	steps  [2]ring // of ringProven and ringOther
	failed ring    // calls that failed or were slow
	good   ring    // other calls
	seq    uint32  // of the newest record
	// fetched is of no use: it keeps the read of peek in the program.
	fetched byte
	_       [64]byte
}

// New returns a Recorder of at most this many bytes, which it takes as needed; at least
// MinMemory.
func New(node string, bytes int64) *Recorder {
	r := &Recorder{node: node, started: time.Now(), seed: maphash.MakeSeed(), refusedBy: map[netip.Addr]int{}}
	per := bytes / shards
	for i := range r.shards {
		s := &r.shards[i]
		s.index = newIndex(per * 3 / 16)
		s.steps = [2]ring{ringProven: newRing(per * 5 / 16), ringOther: newRing(per / 16)}
		s.failed, s.good = newRing(per*3/8), newRing(per/16)
	}
	return r
}

func (r *Recorder) shard(id devices.ID) (s *shard, hash uint64) {
	hash = maphash.String(r.seed, string(id))
	return &r.shards[hash&(shards-1)], hash
}

// entry returns the entry of a device, and adds one if there is none. The caller holds mu.
func (r *Recorder) entry(s *shard, hash uint64, now uint32) *entry {
	e := s.index.get(hash)
	if e == nil {
		var grown int64
		e, grown = s.index.add(hash, s.age)
		r.Memory.Add(grown)
		e.at = now
		for i := range e.last {
			e.last[i] = uint32(s.steps[i].oldest) - 1 // none
		}
	}
	if passed := now - e.at; passed >= stepPause {
		for i := range e.spent {
			e.spent[i] -= uint8(min(uint32(e.spent[i]), passed/stepPause))
		}
		e.spentCalls -= uint16(min(uint32(e.spentCalls), passed/callPause))
		e.at = now - passed%stepPause
	}
	return e
}

// next returns the number of a new record.
func (s *shard) next() uint32 {
	s.seq++
	return s.seq
}

// age returns how old the newest record of a device is; ok is false if it has none. A device of
// which nothing was proven is older than all others.
func (s *shard) age(e *entry) (age uint64, ok bool) {
	if pos, ok := s.steps[ringProven].resolve(e.last[ringProven]); ok {
		return s.steps[ringProven].next - pos, true
	}
	_, ok = s.steps[ringOther].resolve(e.last[ringOther])
	return math.MaxUint64, ok
}

// Step records a step.
func (r *Recorder) Step(step devices.Step) {
	if step.Unknown {
		r.refuse(step)
		return
	}
	at := time.Since(r.started)
	s, hash := r.shard(step.Device)
	kind, way, flags := kinds[step.Kind], ringOther, byte(0)
	if step.Proven {
		way, flags = ringProven, flagProven
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ring := r.entry(s, hash, uint32(at/time.Second)), &s.steps[way]
	if e.spent[way] >= stepBurst {
		r.Combined.Add(1)
		ring.combine(e.last[way], kind)
		return
	}
	e.spent[way]++
	s.fetched = ring.peek()
	var space [maxStep]byte
	rec := record{b: space[:]}
	rec.head(at, kind, flags, e.last[way], uint32(hash), s.next())
	rec.step(&step)
	pos, allocated := ring.write(rec.done())
	e.last[way] = uint32(pos)
	r.count(allocated)
}

func (r *Recorder) count(allocated int64) {
	r.Records.Add(1)
	if allocated > 0 {
		r.Memory.Add(allocated)
	}
}

// combine counts a step in the device's last one of this kind, or in its newest one, at last.
func (r *ring) combine(last uint32, kind byte) {
	newest, ok := r.resolve(last)
	if !ok {
		return
	}
	found, pos := newest, newest
	for range maxCombine {
		head := r.at(pos)
		if head[offKind] == kind {
			found = pos
			break
		}
		if pos, ok = r.resolve(binary.LittleEndian.Uint32(head[offPrev:])); !ok {
			break
		}
	}
	addCount(r.at(found + offCount/slot)[offCount%slot:])
}

// refuse keeps a step of an unknown device. Once there are maxRefusals, the address that has the most
// loses its oldest one, so that no address drives out those of others.
func (r *Recorder) refuse(s devices.Step) {
	s.At, s.Node, s.Count = clock.Now(), r.node, 1
	s.Text = cut(s.Text, devices.MaxStepText)
	host := hostOf(s.Remote)
	r.refusalsMu.Lock()
	defer r.refusalsMu.Unlock()
	if n := len(r.refusals); n > 0 {
		if p := &r.refusals[n-1]; p.Device == s.Device && p.Kind == s.Kind && p.Cause == s.Cause && p.Remote == s.Remote {
			p.Count, p.At = p.Count+1, s.At
			return
		}
	}
	r.refusedBy[host]++
	if len(r.refusals) == maxRefusals {
		r.dropRefusal()
	}
	r.refusals = append(r.refusals, s)
}

// dropRefusal removes the oldest refusal of an address that has the most.
func (r *Recorder) dropRefusal() {
	most := 0
	for _, n := range r.refusedBy {
		most = max(most, n)
	}
	r.removeRefusal(slices.IndexFunc(r.refusals, func(s devices.Step) bool { return r.refusedBy[hostOf(s.Remote)] == most }))
}

// removeRefusal removes one refusal.
func (r *Recorder) removeRefusal(i int) {
	host := hostOf(r.refusals[i].Remote)
	if r.refusedBy[host]--; r.refusedBy[host] == 0 {
		delete(r.refusedBy, host)
	}
	r.refusals = slices.Delete(r.refusals, i, i+1)
}

// hostOf returns the address by which refusals are counted: for IPv6, its /64 network.
func hostOf(addr netip.Addr) netip.Addr {
	if addr = addr.Unmap(); addr.Is6() {
		network, _ := addr.WithZone("").Prefix(64) // cannot fail
		return network.Addr()
	}
	return addr
}

// Call records a call.
func (r *Recorder) Call(c devices.CallStep) {
	flags := byte(0)
	if c.Sent {
		flags |= flagSent
	}
	if c.Holder {
		flags |= flagHolder
	}
	if c.Late {
		flags |= flagLate
	}
	at := c.At.Sub(r.started)
	s, hash := r.shard(c.Device)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := r.entry(s, hash, uint32(max(0, at+c.Took)/time.Second))
	if e.spentCalls >= callBurst {
		r.Dropped.Add(1)
		return
	}
	e.spentCalls++
	var space [maxCall]byte
	rec := record{b: space[:]}
	rec.head(at, kindCall, flags, 0, uint32(hash), s.next())
	rec.call(&c)
	to := &s.good
	if c.Outcome != "ok" && c.Outcome != "sent" || c.Late || c.Took > SlowCall {
		to = &s.failed
	}
	_, allocated := to.write(rec.done())
	r.count(allocated)
}

// Steps returns the steps of a device after a place in its log, newest first, at most limit: those that
// were proven, or the others. An empty kind selects all.
func (r *Recorder) Steps(id devices.ID, proven bool, kind devices.StepKind, after devices.LogPosition, limit int) (steps []devices.Step) {
	s, hash := r.shard(id)
	way := ringOther
	if proven {
		way = ringProven
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ring := s.index.get(hash), &s.steps[way]
	if e == nil {
		return nil
	}
	var buf []byte
	pos, ok := ring.resolve(e.last[way])
	for ok && len(steps) < limit {
		buf = ring.read(buf[:0], pos)
		if binary.LittleEndian.Uint32(buf[offCheck:]) != uint32(hash) {
			break // the position was used again
		}
		if step := r.readStep(id, buf); (kind == "" || step.Kind == kind) && after.Precedes(step.Position()) {
			steps = append(steps, step)
		}
		pos, ok = ring.resolve(binary.LittleEndian.Uint32(buf[offPrev:]))
	}
	return steps
}

// Calls returns the calls of a device after a place in its log, newest first, at most limit.
func (r *Recorder) Calls(id devices.ID, after devices.LogPosition, limit int) (calls []devices.CallStep) {
	s, hash := r.shard(id)
	r.scan(s, func(rec []byte) {
		if binary.LittleEndian.Uint32(rec[offCheck:]) != uint32(hash) {
			return
		}
		if c := r.readCall(rec); c.Device == id && after.Precedes(c.Position()) {
			calls = append(calls, c)
		}
	})
	slices.SortFunc(calls, func(a, b devices.CallStep) int { return a.Position().Compare(b.Position()) })
	return calls[:min(len(calls), limit)]
}

// CallsOf returns what is recorded about a call.
func (r *Recorder) CallsOf(call string) (calls []devices.CallStep) {
	if call == "" || len(call) > maxName {
		return nil
	}
	for i := range r.shards {
		r.scan(&r.shards[i], func(rec []byte) {
			if body := rec[headSize:]; int(body[0]) == len(call) && string(body[1:1+len(call)]) == call {
				calls = append(calls, r.readCall(rec))
			}
		})
	}
	return calls
}

// CallsOn returns the calls of some devices that had an outcome.
func (r *Recorder) CallsOn(ids []devices.ID, outcome string) (calls []devices.CallStep) {
	asked, checks := map[devices.ID]bool{}, map[*shard]map[uint32]bool{}
	for _, id := range ids {
		s, hash := r.shard(id)
		if asked[id] = true; checks[s] == nil {
			checks[s] = map[uint32]bool{}
		}
		checks[s][uint32(hash)] = true
	}
	for s, of := range checks {
		r.scan(s, func(rec []byte) {
			if !of[binary.LittleEndian.Uint32(rec[offCheck:])] {
				return
			}
			if c := r.readCall(rec); c.Outcome == outcome && asked[c.Device] {
				calls = append(calls, c)
			}
		})
	}
	return calls
}

// scan calls f for the calls of a shard, with the shard locked.
func (r *Recorder) scan(s *shard, f func(rec []byte)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var buf []byte
	for _, ring := range []*ring{&s.failed, &s.good} {
		for pos := ring.oldest; pos < ring.next; {
			buf = ring.read(buf[:0], pos)
			f(buf)
			pos += uint64(len(buf) / slot)
		}
	}
}

// Forget deletes the steps of a device, its calls, and what it was refused.
func (r *Recorder) Forget(id devices.ID) {
	s, hash := r.shard(id)
	s.mu.Lock()
	r.forgetLocked(s, id, hash)
	s.mu.Unlock()
	r.refusalsMu.Lock()
	defer r.refusalsMu.Unlock()
	for i := len(r.refusals) - 1; i >= 0; i-- {
		if r.refusals[i].Device == id {
			r.removeRefusal(i)
		}
	}
}

func (r *Recorder) forgetLocked(s *shard, id devices.ID, hash uint64) {
	if e := s.index.get(hash); e != nil {
		for i := range s.steps {
			steps := &s.steps[i]
			for pos, ok := steps.resolve(e.last[i]); ok; {
				head := steps.at(pos)
				if binary.LittleEndian.Uint32(head[offCheck:]) != uint32(hash) {
					break // the position was used again
				}
				prev := binary.LittleEndian.Uint32(head[offPrev:])
				steps.clear(pos)
				pos, ok = steps.resolve(prev)
			}
		}
		*e = entry{}
	}
	var buf []byte
	for _, ring := range []*ring{&s.failed, &s.good} {
		for pos := ring.oldest; pos < ring.next; pos += uint64(len(buf) / slot) {
			buf = ring.read(buf[:0], pos)
			if binary.LittleEndian.Uint32(buf[offCheck:]) == uint32(hash) && r.readCall(buf).Device == id {
				ring.clear(pos)
			}
		}
	}
}

// Refusals returns the steps of unknown devices, newest first.
func (r *Recorder) Refusals() []devices.Step {
	r.refusalsMu.Lock()
	defer r.refusalsMu.Unlock()
	list := slices.Clone(r.refusals)
	slices.SortStableFunc(list, func(a, b devices.Step) int { return b.At.Compare(a.At) })
	return list
}

// Reach returns the time since which the steps of a device are kept.
func (r *Recorder) Reach(id devices.ID) time.Time {
	s, _ := r.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	ring := &s.steps[ringProven]
	if ring.oldest == 0 {
		return r.started
	}
	return r.timeOf(ring.at(ring.oldest))
}
