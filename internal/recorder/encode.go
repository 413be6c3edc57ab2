package recorder

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"fleetd/internal/devices"
)

// The head of a record: the time in ms since the recorder started (5 bytes), the kind, the
// number of slots, flags, the device's record before this one (low 32 bits of its
// position), a part of its hash, how many equal steps it stands for, and a number that orders the
// records of the shard.
const (
	offTime  = 0
	offKind  = 5
	offSlots = 6
	offFlags = 7
	offPrev  = 8
	offCheck = 12
	offCount = 16
	offSeq   = 18
	headSize = 22
)

// The sizes of the largest records in bytes.
const (
	maxStep = 160
	maxCall = 704
)

// Flags of calls, and of steps.
const (
	flagSent = 1 << iota
	flagHolder
	flagLate
	flagProven
)

// kindCall is the kind of calls; that of steps is in kinds.
const kindCall = 255

// Limits of the texts of a call, in bytes.
const (
	maxName   = 64
	maxDetail = 128
)

// record is a record that is being made in a buffer of zeros.
type record struct {
	b []byte
	n int
}

func (r *record) uint(v uint64) { r.n += binary.PutUvarint(r.b[r.n:], v) }

func (r *record) ms(d time.Duration) { r.uint(uint64(max(0, d.Milliseconds()))) }

// text writes a text, at most limit bytes of it: a longer one ends after a word, with an ellipsis.
func (r *record) text(s string, limit int) {
	if len(s) <= limit {
		r.uint(uint64(len(s)))
		r.n += copy(r.b[r.n:], s)
		return
	}
	end := limit - len(ellipsis)
	if space := strings.LastIndexByte(s[:end+1], ' '); space >= end/2 { // else it has one long word
		end = space
	}
	for i := 1; i < utf8.UTFMax && end > 0 && !utf8.RuneStart(s[end]); i++ {
		end--
	}
	r.uint(uint64(end + len(ellipsis)))
	r.n += copy(r.b[r.n:], s[:end])
	r.n += copy(r.b[r.n:], ellipsis)
}

// ellipsis is at the end of a text that was cut.
const ellipsis = "\u2026"

// cut returns a text as it is read from a record that limits it.
func cut(s string, limit int) string {
	space := make([]byte, limit+binary.MaxVarintLen64)
	rec := record{b: space}
	rec.text(s, limit)
	in := reader{space}
	return in.text()
}

// done fills the record up to whole slots and returns it.
func (r *record) done() []byte {
	n := (r.n + slot - 1) / slot * slot
	r.b[offSlots] = byte(n / slot)
	return r.b[:n]
}

// head writes all of the head but the number of slots.
func (r *record) head(at time.Duration, kind, flags byte, prev, check, seq uint32) {
	ms := uint64(max(0, at.Milliseconds()))
	binary.LittleEndian.PutUint32(r.b[offTime:], uint32(ms))
	r.b[offTime+4] = byte(ms >> 32)
	r.b[offKind], r.b[offFlags] = kind, flags
	binary.LittleEndian.PutUint32(r.b[offPrev:], prev)
	binary.LittleEndian.PutUint32(r.b[offCheck:], check)
	binary.LittleEndian.PutUint16(r.b[offCount:], 1)
	binary.LittleEndian.PutUint32(r.b[offSeq:], seq)
	r.n = headSize
}

var transports = []devices.Transport{devices.TransportNone, devices.TransportWebSocket, devices.TransportMQTT}

// kinds and causes are the indexes in devices.StepKinds and devices.StepCauses plus one;
// 0 stands for others.
var (
	kinds  = indexOf(devices.StepKinds)
	causes = indexOf(devices.StepCauses)
)

func indexOf[T comparable](list []T) map[T]byte {
	index := map[T]byte{}
	for i, v := range list {
		index[v] = byte(i + 1)
	}
	return index
}

// wordOf is the reverse of indexOf.
func wordOf[T ~string](list []T, index byte) T {
	if index == 0 {
		return ""
	}
	return list[index-1]
}

func (r *record) step(s *devices.Step) {
	r.b[r.n], r.b[r.n+1] = causes[s.Cause], byte(max(0, slices.Index(transports, s.Transport)))
	r.n += 2
	r.uint(uint64(s.Epoch))
	r.uint(uint64(s.Generation))
	r.ms(s.Took)
	r.uint(uint64(s.Calls))
	var address [16]byte
	n := 0
	if s.Remote.IsValid() {
		address = s.Remote.As16()
		n = len(address)
		if s.Remote.Is4() {
			v4 := s.Remote.As4()
			n = copy(address[:], v4[:])
		}
	}
	r.b[r.n] = byte(n)
	r.n += 1 + copy(r.b[r.n+1:], address[:n])
	r.text(s.Text, devices.MaxStepText)
	r.text(s.Image[:min(len(s.Image), devices.ImageDigits)], devices.ImageDigits)
}

func (r *record) call(c *devices.CallStep) {
	for _, text := range [...]string{c.Call, string(c.Device), c.Key, c.Tool, c.Ahead, c.Outcome, c.Rule, c.Held} {
		r.text(text, maxName)
	}
	r.text(c.Detail, maxDetail)
	r.ms(c.Took)
	r.ms(c.Waited)
	r.uint(uint64(c.Bytes))
}

// reader reads what record wrote.
type reader struct{ b []byte }

func (r *reader) byte() byte {
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	r.b = r.b[n:]
	return v
}

func (r *reader) ms() time.Duration { return time.Duration(r.uint()) * time.Millisecond }

func (r *reader) text() string {
	n := r.uint()
	text := strings.ToValidUTF8(string(r.b[:n]), "\uFFFD")
	r.b = r.b[n:]
	return text
}

// timeOf returns when a record was written.
func (r *Recorder) timeOf(head []byte) time.Time {
	ms := int64(binary.LittleEndian.Uint32(head[offTime:])) | int64(head[offTime+4])<<32
	return r.started.Add(time.Duration(ms) * time.Millisecond)
}

// The rings of steps.
const (
	ringProven = iota
	ringOther
)

func (r *Recorder) readStep(id devices.ID, record []byte) devices.Step {
	in := reader{record[headSize:]}
	s := devices.Step{Kind: wordOf(devices.StepKinds, record[offKind]), Device: id, At: r.timeOf(record), Node: r.node,
		Count: int(binary.LittleEndian.Uint16(record[offCount:])), Proven: record[offFlags]&flagProven != 0, Seq: uint64(binary.LittleEndian.Uint32(record[offSeq:]))}
	s.Cause, s.Transport = wordOf(devices.StepCauses, in.byte()), transports[in.byte()]
	s.Epoch, s.Generation = devices.Epoch(in.uint()), int64(in.uint())
	s.Took, s.Calls = in.ms(), int(in.uint())
	n := in.byte()
	s.Remote, _ = netip.AddrFromSlice(in.b[:n]) // invalid without an address
	in.b = in.b[n:]
	s.Text = in.text()
	s.Image = in.text()
	return s
}

func (r *Recorder) readCall(record []byte) devices.CallStep {
	in := reader{record[headSize:]}
	flags := record[offFlags]
	c := devices.CallStep{Call: in.text(), Device: devices.ID(in.text()), Key: in.text(), Tool: in.text(), Ahead: in.text(),
		Outcome: in.text(), Rule: in.text(), Held: in.text(), Detail: in.text(), At: r.timeOf(record),
		Sent: flags&flagSent != 0, Holder: flags&flagHolder != 0, Late: flags&flagLate != 0, Node: r.node, Seq: uint64(binary.LittleEndian.Uint32(record[offSeq:]))}
	c.Took, c.Waited, c.Bytes = in.ms(), in.ms(), int(in.uint())
	return c
}

// addCount counts one more step in a record.
func addCount(count []byte) {
	if n := binary.LittleEndian.Uint16(count); n < math.MaxUint16 {
		binary.LittleEndian.PutUint16(count, n+1)
	}
}
