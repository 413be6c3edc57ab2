package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"fleetd/internal/api"
)

// count returns the number of entries of a block.
func (b *Block) count() int { return bytes.Count(b.Entries, []byte{'\n'}) }

// maxFaults is how many faults a api.AuditReport contains at most.
const maxFaults = 100

// Verifier verifies blocks in the order of (run, first sequence).
type Verifier struct {
	// Key is the key of the fleet's blocks.
	Key []byte

	report api.AuditReport
	last   Block // the previous one of this run; without its entries
	ended  bool
}

// Add verifies the next block.
func (v *Verifier) Add(b *Block) {
	r := &v.report
	r.Blocks++
	r.Entries += int64(b.count())
	where := fmt.Sprintf("run %s of node %s, entries %d to %d", b.Run, b.Node, b.FirstSeq, b.LastSeq)
	if b.Run != v.last.Run {
		v.endRun()
		r.Runs++
		if b.FirstSeq != 1 {
			r.Headless++
		} else if b.Previous != (Hash{}) {
			v.fault(where + " are the first of the run, but follow another block")
		}
	} else {
		switch {
		case b.Previous == v.last.Hash:
		case b.FirstSeq == v.last.LastSeq+1:
			v.fault(where + " do not follow the previous block")
		default:
			v.fault(fmt.Sprintf("%s: entries %d to %d before them are missing", where, v.last.LastSeq+1, b.FirstSeq-1))
		}
		if v.ended {
			v.fault(where + " follow the end of the run")
		}
	}
	if b.Sum(v.Key) != b.Hash {
		v.fault(where + " are not verifiable: they were modified, or written without the fleet's key")
	}
	v.lines(b, where)
	v.last = *b
	v.last.Entries = nil
}

// lines verifies the numbers of the entries.
func (v *Verifier) lines(b *Block, where string) {
	want := b.FirstSeq
	last := int64(0)
	for text := range bytes.Lines(b.Entries) {
		var line Line
		if err := json.Unmarshal(text, &line); err != nil {
			v.fault(where + " cannot be parsed")
			return
		}
		if line.Kind == KindRun && line.Count > 0 { // a gap, or a stop after one
			v.report.Dropped += line.Count
			want += line.Count
		}
		last = line.Seq
		if line.Seq != want && line.Seq != b.FirstSeq { // a gap may end before a block
			v.fault(fmt.Sprintf("%s: entry %d is in place of entry %d", where, line.Seq, want))
		}
		want = line.Seq + 1
		v.ended = line.Kind == KindRun && line.Action == "stop"
	}
	if last != b.LastSeq {
		v.fault(fmt.Sprintf("%s end with entry %d", where, last))
	}
}

func (v *Verifier) endRun() {
	if v.last.Run != "" && !v.ended && len(v.report.Unended) < maxFaults {
		v.report.Unended = append(v.report.Unended, fmt.Sprintf("run %s of node %s, last entry %s", v.last.Run, v.last.Node, v.last.LastAt.Format(time.RFC3339)))
	}
	v.ended = false
}

func (v *Verifier) fault(sentence string) {
	if len(v.report.Faults) < maxFaults {
		v.report.Faults = append(v.report.Faults, sentence)
	}
}

// NeedsKey reports whether there were blocks but no key to verify them.
func (v *Verifier) NeedsKey() bool { return v.report.Blocks > 0 && len(v.Key) == 0 }

// Report ends the verification and returns its result.
func (v *Verifier) Report() api.AuditReport {
	v.endRun()
	v.last.Run = ""
	v.report.Intact = len(v.report.Faults) == 0
	v.report.Faults, v.report.Unended = append([]string{}, v.report.Faults...), append([]string{}, v.report.Unended...)
	return v.report
}

// header is the line before a block's entries in an export.
type header struct {
	Block struct {
		Run      string `json:"run"`
		Node     string `json:"node"`
		FirstSeq int64  `json:"first_seq"`
		LastSeq  int64  `json:"last_seq"`
		FirstAt  int64  `json:"first_at_us"`
		LastAt   int64  `json:"last_at_us"`
		Lines    int    `json:"lines"`
		Previous string `json:"previous"`
		Hash     string `json:"hash"`
	} `json:"block"`
}

// AppendExport appends a block in the format of exports: a line that describes it, and its entries
// unchanged.
func AppendExport(dst []byte, b *Block) []byte {
	var h header
	h.Block.Run, h.Block.Node, h.Block.FirstSeq, h.Block.LastSeq = b.Run, b.Node, b.FirstSeq, b.LastSeq
	h.Block.FirstAt, h.Block.LastAt, h.Block.Lines = b.FirstAt.UnixMicro(), b.LastAt.UnixMicro(), b.count()
	h.Block.Previous, h.Block.Hash = b.Previous.String(), b.Hash.String()
	line, err := json.Marshal(h)
	if err != nil { // cannot fail for a struct of strings and numbers
		return dst
	}
	return append(append(append(dst, line...), '\n'), b.Entries...)
}

// maxLine is the longest line of an export, in bytes.
const maxLine = 1 << 20

// ReadExport calls f for each block of an export.
func ReadExport(r io.Reader, f func(*Block) error) error {
	in := bufio.NewReaderSize(r, 64<<10)
	number := 0
	next := func() ([]byte, error) {
		number++
		var line []byte
		for {
			part, err := in.ReadSlice('\n')
			line = append(line, part...)
			switch {
			case len(line) > maxLine:
				return nil, fmt.Errorf("line %d is longer than %d bytes", number, maxLine)
			case errors.Is(err, bufio.ErrBufferFull):
			case errors.Is(err, io.EOF) && len(line) > 0:
				return nil, fmt.Errorf("line %d is incomplete: the export was not written completely", number)
			default:
				return line, err
			}
		}
	}
	for {
		line, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var h header
		if err := json.Unmarshal(line, &h); err != nil || h.Block.Run == "" {
			return fmt.Errorf("line %d is not the header of a block; give an export of fleetd's audit log", number)
		}
		b := Block{Run: h.Block.Run, Node: h.Block.Node, FirstSeq: h.Block.FirstSeq, LastSeq: h.Block.LastSeq,
			FirstAt: time.UnixMicro(h.Block.FirstAt).UTC(), LastAt: time.UnixMicro(h.Block.LastAt).UTC()}
		if b.Previous, err = ParseHash(h.Block.Previous); err == nil {
			b.Hash, err = ParseHash(h.Block.Hash)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		for range h.Block.Lines {
			line, err := next()
			if err != nil {
				return fmt.Errorf("the export ends within a block: %w", err)
			}
			b.Entries = append(b.Entries, line...)
		}
		if err := f(&b); err != nil {
			return err
		}
	}
}
