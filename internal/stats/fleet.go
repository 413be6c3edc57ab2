package stats

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"fleetd/internal/devices"
)

// Question is the kind of the question with which nodes gather the parts of an answer.
const Question = "stats"

// maxPart limits the decompressed answer of one node, in bytes.
const maxPart = 16 << 20

// Fleet answers queries about all nodes. Its fields do not change.
type Fleet struct {
	Recorder *Recorder
	// Nodes returns the names of the live nodes.
	Nodes  func() []string
	Gather devices.Gather
}

// Start is when a node started: it has nothing from before.
type Start struct {
	Node string
	At   time.Time
}

// Answer is what the nodes have of a range.
type Answer struct {
	Range
	// Nodes are those whose samples are in the answer; Missing those that did not answer.
	Nodes, Missing []string
	// Starts are the starts of nodes in the range.
	Starts []Start
	Series []Series
}

// Query adds up what the nodes have of a range, in about a second at most; of one node if it is named. known is
// false if there is no node with that name.
func (f *Fleet) Query(ctx context.Context, q Range, node string) (a Answer, known bool, err error) {
	nodes := f.Nodes()
	if node != "" {
		if !slices.Contains(nodes, node) {
			return Answer{}, false, nil
		}
		nodes = []string{node}
	}
	question, err := json.Marshal(q)
	if err != nil {
		return Answer{}, true, err
	}
	a = Answer{Range: q}
	answers, missing := f.Gather(ctx, Question, question, nodes)
	var parts []Part
	if slices.Contains(nodes, f.Recorder.node) {
		parts = append(parts, f.Recorder.Part(q))
	}
	for name, content := range answers {
		part, err := decodePart(content)
		if err != nil { // as good as no answer
			missing = append(missing, name)
			continue
		}
		part.Node = name
		parts = append(parts, part)
	}
	slices.SortFunc(parts, func(a, b Part) int { return strings.Compare(a.Node, b.Node) })
	slices.Sort(missing)
	a.Missing, a.Series = missing, Merge(q, parts)
	for _, p := range parts {
		a.Nodes = append(a.Nodes, p.Node)
		if !p.Started.Before(q.Since()) && p.Started.Before(q.Until()) {
			a.Starts = append(a.Starts, Start{p.Node, p.Started})
		}
	}
	return a, true, nil
}

// Answer answers another node's question.
func (r *Recorder) Answer(_ context.Context, question []byte) ([]byte, error) {
	var q Range
	if err := json.Unmarshal(question, &q); err != nil {
		return nil, err
	}
	if err := q.valid(); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if err := json.NewEncoder(w).Encode(r.Part(q)); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func decodePart(content []byte) (p Part, err error) {
	r, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		return p, err
	}
	if err := json.NewDecoder(io.LimitReader(r, maxPart)).Decode(&p); err != nil {
		return p, fmt.Errorf("the figures of another node: %w", err)
	}
	return p, nil
}
