// Package recorder keeps what happened to devices in a fixed amount of memory: every
// connection in one record, details of failures, and the steps of calls. It is on before
// something fails, and answers why it did.
//
// Devices are divided into shards by a hash, each with rings of bytes under its own mutex:
// one for steps, one for calls that failed or were slow, one for other calls, so that
// failures outlive successes. A device that exceeds its rate has its steps combined and
// its calls dropped, so that it drives out nobody's records. Nothing is kept in a session,
// and devices without records cost nothing.
package recorder

import (
	"encoding/binary"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

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
	refusals   []devices.Step // of unknown devices, a ring
	refused    int            // how many there were

	// Memory is how many bytes are allocated.
	Memory atomic.Int64
	// Records counts records, Combined steps beyond the rate of their device that were
	// combined with an earlier one, Dropped calls beyond it.
	Records, Combined, Dropped atomic.Uint64
}

type shard struct {
	mu     sync.Mutex
	index  index
	steps  ring
	failed ring // calls that failed or were slow
	good   ring // other calls
	// fetched is of no use: it keeps the read of peek in the program.
	fetched byte
	_       [64]byte
}

// New returns a Recorder of at most this many bytes, which it takes as needed; at least
// MinMemory.
func New(node string, bytes int64) *Recorder {
	r := &Recorder{node: node, started: time.Now(), seed: maphash.MakeSeed()}
	per := bytes / shards
	for i := range r.shards {
		s := &r.shards[i]
		s.index = newIndex(per * 3 / 16)
		s.steps, s.failed, s.good = newRing(per*5/16), newRing(per*3/8), newRing(per/16)
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
		e, grown = s.index.add(hash, func(last uint32) (uint64, bool) {
			pos, ok := s.steps.resolve(last)
			return s.steps.next - pos, ok
		})
		r.Memory.Add(grown)
		e.at = now
		e.last = uint32(s.steps.oldest) - 1 // none
	}
	if passed := now - e.at; passed >= stepPause {
		e.spent -= uint16(min(uint32(e.spent), passed/stepPause))
		e.spentCalls -= uint16(min(uint32(e.spentCalls), passed/callPause))
		e.at = now - passed%stepPause
	}
	return e
}

// Step records a step.
func (r *Recorder) Step(step devices.Step) {
	if step.Unknown {
		r.refuse(step)
		return
	}
	at := time.Since(r.started)
	s, hash := r.shard(step.Device)
	kind := kinds[step.Kind]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := r.entry(s, hash, uint32(at/time.Second))
	if e.spent >= stepBurst {
		r.Combined.Add(1)
		s.combine(e, kind)
		return
	}
	e.spent++
	s.fetched = s.steps.peek()
	var space [maxStep]byte
	rec := record{b: space[:]}
	rec.head(at, kind, 0, e.last, uint32(hash))
	rec.step(&step)
	pos, allocated := s.steps.write(rec.done())
	e.last = uint32(pos)
	r.count(allocated)
}

func (r *Recorder) count(allocated int64) {
	r.Records.Add(1)
	if allocated > 0 {
		r.Memory.Add(allocated)
	}
}

// combine counts a step in the device's last one of this kind, or in its newest one.
func (s *shard) combine(e *entry, kind byte) {
	newest, ok := s.steps.resolve(e.last)
	if !ok {
		return
	}
	found, pos := newest, newest
	for range maxCombine {
		head := s.steps.at(pos)
		if head[offKind] == kind {
			found = pos
			break
		}
		if pos, ok = s.steps.resolve(binary.LittleEndian.Uint32(head[offPrev:])); !ok {
			break
		}
	}
	addCount(s.steps.at(found + offCount/slot)[offCount%slot:])
}

// refuse keeps a step of an unknown device.
func (r *Recorder) refuse(s devices.Step) {
	s.At, s.Node, s.Count = time.Now(), r.node, 1
	s.Text = strings.ToValidUTF8(strings.Clone(s.Text[:min(len(s.Text), devices.MaxStepText)]), "\uFFFD")
	r.refusalsMu.Lock()
	defer r.refusalsMu.Unlock()
	last := (r.refused + maxRefusals - 1) % maxRefusals
	if last < len(r.refusals) {
		if p := &r.refusals[last]; p.Device == s.Device && p.Kind == s.Kind && p.Cause == s.Cause && p.Remote == s.Remote {
			p.Count, p.At = p.Count+1, s.At
			return
		}
	}
	if len(r.refusals) < maxRefusals {
		r.refusals = append(r.refusals, s)
	} else {
		r.refusals[r.refused%maxRefusals] = s
	}
	r.refused++
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
	rec.head(at, kindCall, flags, 0, uint32(hash))
	rec.call(&c)
	to := &s.good
	if c.Outcome != "ok" || c.Late || c.Took > SlowCall {
		to = &s.failed
	}
	_, allocated := to.write(rec.done())
	r.count(allocated)
}

// Steps returns the steps of a device before a time, newest first, at most limit; a zero
// time and an empty kind select all.
func (r *Recorder) Steps(id devices.ID, kind devices.StepKind, before time.Time, limit int) (steps []devices.Step) {
	s, hash := r.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.index.get(hash)
	if e == nil {
		return nil
	}
	var buf []byte
	pos, ok := s.steps.resolve(e.last)
	for ok && len(steps) < limit {
		buf = s.steps.read(buf[:0], pos)
		if binary.LittleEndian.Uint32(buf[offCheck:]) != uint32(hash) {
			break // the position was used again
		}
		if step := r.readStep(id, buf); (kind == "" || step.Kind == kind) && (before.IsZero() || step.At.Before(before)) {
			steps = append(steps, step)
		}
		pos, ok = s.steps.resolve(binary.LittleEndian.Uint32(buf[offPrev:]))
	}
	return steps
}

// Calls returns the calls of a device before a time, newest first, at most limit.
func (r *Recorder) Calls(id devices.ID, before time.Time, limit int) (calls []devices.CallStep) {
	s, hash := r.shard(id)
	r.scan(s, func(rec []byte) {
		if binary.LittleEndian.Uint32(rec[offCheck:]) != uint32(hash) {
			return
		}
		if c := r.readCall(rec); c.Device == id && (before.IsZero() || c.At.Before(before)) {
			calls = append(calls, c)
		}
	})
	slices.SortStableFunc(calls, func(a, b devices.CallStep) int { return b.At.Compare(a.At) })
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
	if s.steps.oldest == 0 {
		return r.started
	}
	return r.timeOf(s.steps.at(s.steps.oldest))
}
