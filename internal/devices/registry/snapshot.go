package registry

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/durable"
	"fleetd/internal/tasks"
)

// Files in the data directory: the registry as of one position, and the changes since.
const (
	SnapshotFile = "registry.snapshot"
	TailFile     = "registry.changes"
)

const (
	snapshotMagic  = "fleetd registry\n"
	snapshotFormat = 1
	recordBytes    = 8 + 8 + 1
	maxHeader      = 1 << 30 // bytes; the header of any fleet is smaller
	// tailLimit is the size of the changes file, in bytes, at which a new snapshot is
	// written.
	tailLimit = 8 << 20
	// writeRetry is the pause after a failed write.
	writeRetry = 10 * time.Second
	// syncEvery is the period of changes that a power failure may lose: they are in the
	// database and on other nodes.
	syncEvery = time.Second
)

// snapshotHeader is the JSON document before the records.
type snapshotHeader struct {
	Format  int    `json:"format"`
	Fleet   string `json:"fleet"` // fingerprint of the secret that keys the hashes
	Members int    `json:"members"`
	// Aspects are those that the writer knew: the state has nothing of others.
	Aspects []devices.Aspect `json:"aspects"`
	Snapshot
}

// storedState is the state that an earlier process stored.
type storedState struct {
	Snapshot
	roster     *roster
	changes    []devices.Change
	incomplete bool // its writer did not know all aspects that this version knows
}

// file writes the snapshot and the changes since, in its own goroutine.
type file struct {
	dir, fleet string
	log        *slog.Logger

	mu      sync.Mutex
	queue   []devices.Change
	full    bool  // a snapshot must be written: it includes the queue
	written int64 // revision up to which changes were written to the operating system
	wrote   chan struct{}
	wake    chan struct{}
	// failed means that the last write failed, for example because the disk is full; the
	// next one writes a full snapshot.
	failed   bool
	failedAt time.Time

	// used only by the writing goroutine
	tail  *os.File // nil: there is no snapshot for it
	last  int64    // revision of the last change in the tail, or of its snapshot
	size  int64
	dirty bool
}

func newFile(dir, fleet string, log *slog.Logger) *file {
	return &file{dir: dir, fleet: fleet, log: log, wrote: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// append queues changes that are in force, in order.
func (f *file) append(list []devices.Change) {
	if f.dir == "" {
		return
	}
	f.mu.Lock()
	if len(f.queue) > maxAhead {
		f.queue, f.full = nil, true // a snapshot is smaller than that many lines
	}
	if !f.full {
		f.queue = append(f.queue, list...)
	}
	f.mu.Unlock()
	tasks.Signal(f.wake)
}

// reset requests a new snapshot, after everything was read again.
func (f *file) reset() {
	f.mu.Lock()
	f.queue, f.full = nil, true
	f.mu.Unlock()
	tasks.Signal(f.wake)
}

// await returns once the changes up to a revision were written to the operating system,
// so that they survive the process; or when ctx ends, since the database has them.
func (f *file) await(ctx context.Context, revision int64) {
	if f.dir == "" {
		return
	}
	for {
		f.mu.Lock()
		done, wrote := f.written >= revision || f.failed, f.wrote
		f.mu.Unlock()
		if done {
			return
		}
		select {
		case <-wrote:
		case <-ctx.Done():
			return
		}
	}
}

// run writes until ctx ends. save returns the full state.
func (f *file) run(ctx context.Context, save func() ([]byte, Snapshot)) {
	if f.dir == "" {
		return
	}
	ticker := time.NewTicker(syncEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			f.write(save)
			f.sync()
			if f.tail != nil {
				_ = f.tail.Close() // already synced
			}
			return
		case <-f.wake:
			f.write(save)
		case <-ticker.C:
			f.write(save) // retries a failed write after writeRetry
			f.sync()
		}
	}
}

func (f *file) write(save func() ([]byte, Snapshot)) {
	f.mu.Lock()
	list, whole := f.queue, f.full
	if f.failed && time.Since(f.failedAt) < writeRetry {
		list, whole = nil, false
	} else {
		f.queue, f.full = nil, false
	}
	f.mu.Unlock()
	if len(list) == 0 && !whole {
		return
	}
	var err error
	if !whole && f.tail != nil {
		err = f.appendTail(list)
	}
	if whole || f.tail == nil || f.size > tailLimit || err != nil {
		err = f.writeSnapshot(save)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && !f.failed {
		f.log.Error("the node's snapshot of the registry cannot be written; without it this node admits no devices after a restart while the database is unreachable", "directory", f.dir, "error", err)
	}
	if f.failed = err != nil; f.failed {
		f.full, f.failedAt = true, time.Now()
	} else if len(list) > 0 {
		f.written = max(f.written, list[len(list)-1].Revision)
	}
	close(f.wrote)
	f.wrote = make(chan struct{})
}

// appendTail appends changes to the tail, one line each, except those that the snapshot
// contains already.
func (f *file) appendTail(list []devices.Change) error {
	var b bytes.Buffer
	for _, c := range list {
		if c.Revision <= f.last {
			continue
		}
		f.last = c.Revision
		line, err := json.Marshal(withoutUnusedValue(c))
		if err != nil {
			return err
		}
		writeLine(&b, line)
	}
	n, err := f.tail.Write(b.Bytes())
	f.size += int64(n)
	f.dirty = true
	return err
}

// withoutUnusedValue removes the value if neither the roster nor the access rules need it.
func withoutUnusedValue(c devices.Change) devices.Change {
	if c.Device != "" && (c.Aspect == devices.AspectName || c.Aspect == devices.AspectSerial || len(c.Aspect) > len(devices.AspectLabel) && c.Aspect[:len(devices.AspectLabel)] == devices.AspectLabel) {
		c.Value = json.RawMessage(`""`)
	}
	return c
}

func writeLine(b *bytes.Buffer, line []byte) {
	fmt.Fprintf(b, "%08x %s\n", crc32.Checksum(line, crcTable), line)
}

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// readLine checks a line of the tail; ok is false if it is truncated or damaged.
func readLine(line []byte) (content []byte, ok bool) {
	if len(line) < 10 || line[8] != ' ' || line[len(line)-1] != '\n' {
		return nil, false
	}
	content = line[9 : len(line)-1]
	return content, fmt.Sprintf("%08x", crc32.Checksum(content, crcTable)) == string(line[:8])
}

func (f *file) sync() {
	if f.dirty && f.tail != nil {
		if err := f.tail.Sync(); err != nil {
			f.log.Warn("the changes since the node's snapshot are not synced", "error", err)
		}
		f.dirty = false
	}
}

// writeSnapshot writes a snapshot and starts an empty tail. After a crash between the two
// the tail names another snapshot and is not used.
func (f *file) writeSnapshot(save func() ([]byte, Snapshot)) (err error) {
	records, s := save()
	if s.Lineage == "" {
		return nil // nothing has been read yet
	}
	if f.tail != nil {
		_ = f.tail.Close() // it is replaced
		f.tail = nil
	}
	reader, writer := io.Pipe()
	go func() { writer.CloseWithError(encodeSnapshot(writer, f.fleet, records, s)) }()
	temp := filepath.Join(f.dir, SnapshotFile+".new")
	if err := errors.Join(removeIfThere(temp), durable.Create(temp, 0o600, reader)); err != nil {
		_ = reader.CloseWithError(err) // ends the writer
		return errors.Join(err, removeIfThere(temp))
	}
	if err := durable.Rename(temp, filepath.Join(f.dir, SnapshotFile)); err != nil {
		return err
	}
	if err := f.createTail(s.Position); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.written = max(f.written, s.Revision)
	return nil
}

// createTail creates an empty tail for the snapshot as of a position.
func (f *file) createTail(at devices.Position) error {
	line, err := json.Marshal(at)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	writeLine(&b, line)
	path := filepath.Join(f.dir, TailFile)
	if err := durable.WriteFile(path, b.Bytes()); err != nil {
		return err
	}
	f.tail, err = os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o600)
	f.size, f.last = int64(b.Len()), at.Revision
	return err
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// encodeSnapshot writes the magic, length and JSON of the header, the records, and the
// SHA-256 of all these.
func encodeSnapshot(w io.Writer, fleet string, records []byte, s Snapshot) error {
	sum := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(w, sum), 1<<16)
	header, err := json.Marshal(snapshotHeader{snapshotFormat, fleet, len(records) / recordBytes, devices.Aspects, s})
	if err != nil {
		return err
	}
	_, err = out.WriteString(snapshotMagic)
	if err == nil {
		err = binary.Write(out, binary.LittleEndian, uint32(len(header)))
	}
	for _, part := range [][]byte{header, records} {
		if err == nil {
			_, err = out.Write(part)
		}
	}
	if err = errors.Join(err, out.Flush()); err != nil {
		return err
	}
	_, err = w.Write(sum.Sum(nil))
	return err
}

// errDamaged means that a snapshot is damaged and not used.
var errDamaged = errors.New("the file is damaged")

// load reads the stored state; nil if there is none that can be used, with an error that
// explains why.
func (f *file) load(key sipKey) (*storedState, error) {
	if f.dir == "" {
		return nil, nil
	}
	content, err := os.Open(filepath.Join(f.dir, SnapshotFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = content.Close() }() // only read
	s, err := decodeSnapshot(content, f.fleet, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", content.Name(), err)
	}
	f.written = s.Revision // also if the tail is missing, or belongs to another snapshot
	return s, f.loadTail(s)
}

func decodeSnapshot(r io.Reader, fleet string, key sipKey) (*storedState, error) {
	sum := sha256.New()
	in := bufio.NewReaderSize(r, 1<<16)
	hashed := io.TeeReader(in, sum)
	magic := make([]byte, len(snapshotMagic)+4)
	if _, err := io.ReadFull(hashed, magic); err != nil || string(magic[:len(snapshotMagic)]) != snapshotMagic {
		return nil, errDamaged
	}
	size := binary.LittleEndian.Uint32(magic[len(snapshotMagic):])
	if size > maxHeader {
		return nil, errDamaged
	}
	var text bytes.Buffer
	if n, err := io.CopyN(&text, hashed, int64(size)); err != nil || n != int64(size) {
		return nil, errDamaged
	}
	var h snapshotHeader
	if err := json.Unmarshal(text.Bytes(), &h); err != nil {
		return nil, errDamaged
	}
	switch {
	case h.Format != snapshotFormat:
		return nil, fmt.Errorf("it has format %d of another version of fleetd", h.Format)
	case h.Fleet != fleet:
		return nil, errors.New("it belongs to a fleet with another secret")
	}
	all, err := decodeRecords(hashed, h.Members, key)
	if err != nil {
		return nil, err
	}
	incomplete := slices.ContainsFunc(devices.Aspects, func(a devices.Aspect) bool { return !slices.Contains(h.Aspects, a) })
	return &storedState{Snapshot: h.Snapshot, roster: all, incomplete: incomplete}, checkSum(in, sum)
}

func decodeRecords(r io.Reader, n int, key sipKey) (*roster, error) {
	all := newRoster(key)
	page := make([]byte, 4096*recordBytes)
	for left := n; left > 0; {
		part := page[:min(left, 4096)*recordBytes]
		if _, err := io.ReadFull(r, part); err != nil {
			return nil, errDamaged
		}
		if left == n { // the count is trusted once there is a record
			all.grow(min(n, 16*MaxMembers))
		}
		left -= len(part) / recordBytes
		for ; len(part) > 0; part = part[recordBytes:] {
			rec := record{client: binary.LittleEndian.Uint64(part[8:]), flags: part[16] &^ flagUsed}
			all.updateHash(binary.LittleEndian.Uint64(part), func(record, bool) (record, bool) { return rec, true })
		}
	}
	if n < 0 {
		return nil, errDamaged
	}
	return all, nil
}

func checkSum(r io.Reader, sum hash.Hash) error {
	want := make([]byte, sum.Size()+1)
	if n, _ := io.ReadFull(r, want); n != sum.Size() || !bytes.Equal(sum.Sum(nil), want[:n]) {
		return errDamaged
	}
	return nil
}

// loadTail adds the changes since the snapshot, up to the first damaged line; further
// changes are appended after them.
func (f *file) loadTail(s *storedState) error {
	path := filepath.Join(f.dir, TailFile)
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := bufio.NewReader(bytes.NewReader(content))
	good := 0
	first, _ := lines.ReadBytes('\n')
	var at devices.Position
	if text, ok := readLine(first); !ok || json.Unmarshal(text, &at) != nil || at != s.Position {
		return nil // belongs to another snapshot
	}
	good += len(first)
	for {
		line, _ := lines.ReadBytes('\n')
		var c devices.Change
		if text, ok := readLine(line); !ok || json.Unmarshal(text, &c) != nil || c.Revision != at.Revision+1 {
			break
		}
		good += len(line)
		at.Revision = c.Revision
		s.changes = append(s.changes, c)
	}
	if err := os.Truncate(path, int64(good)); err != nil {
		return err
	}
	f.tail, err = os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o600)
	f.size, f.written, f.last = int64(good), at.Revision, at.Revision
	return err
}

// save returns the current state for a snapshot, with the roster as records.
func (r *Registry) save() (records []byte, s Snapshot) {
	r.follow.Lock()
	defer r.follow.Unlock()
	r.mu.RLock()
	defer r.mu.RUnlock()
	s = Snapshot{Position: r.at, Rotation: r.rotation, Policy: r.policy, ClientKey: r.clientKey}
	for _, x := range r.exceptions {
		s.Exceptions = append(s.Exceptions, x)
	}
	for _, k := range r.keys {
		s.Keys = append(s.Keys, k)
	}
	all := r.roster.Load()
	records = make([]byte, 0, (all.n.Load()+1)*recordBytes)
	all.each(func(h uint64, rec record) {
		records = binary.LittleEndian.AppendUint64(records, h)
		records = binary.LittleEndian.AppendUint64(records, rec.client)
		records = append(records, rec.flags)
	})
	return records, s
}
