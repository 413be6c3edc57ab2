package lobby

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

// Limits in time of a request's body and its answer.
const (
	// WriteTime is how long one piece of an answer may wait for its reader.
	WriteTime  = 15 * time.Second
	writePiece = 64 << 10 // bytes, so that a slow reader of a large answer is not cut
	// lateBody is how long the rest of a body is read after the answer: a client
	// that is still sending then reads its answer and not a reset connection.
	lateBody = time.Second
	// rateStep is how often the deadline of a body follows what has arrived.
	rateStep = 250 * time.Millisecond
)

// Pace is the slowest that a body may arrive: Grace for the whole, and more for
// what has come at Rate bytes per second (0: no more), but no longer than Most
// (0: no bound). The zero Pace sets no deadlines.
type Pace struct {
	Grace time.Duration
	Rate  int64
	Most  time.Duration
	Late  *atomic.Uint64 // counts bodies that did not keep it; may be nil
}

// DefaultPace is that of requests whose route has no other.
var DefaultPace = Pace{Grace: 10 * time.Second, Rate: 2 << 10}

// AnswerFirst lets a handler answer before the body has arrived, so that a
// refusal waits for nobody, and closes connections whose body does not follow
// the answer. Bodies arrive at pace or end with a timeout.
func AnswerFirst(next http.Handler, pace Pace) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// net/http gives requests without a body this value.
		if r.Body == nil || r.Body == http.NoBody || pace == (Pace{}) && r.Method == http.MethodGet { // WebSocket requests become connections
			next.ServeHTTP(w, r)
			return
		}
		control := http.NewResponseController(w)
		if err := control.EnableFullDuplex(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			http.Error(w, "the request cannot be read: "+err.Error(), http.StatusInternalServerError)
			return
		}
		body := &pacedBody{ReadCloser: r.Body, control: control}
		body.begin(pace)
		answer := &earlyAnswer{ResponseWriter: w, body: body, waits: r.Header.Get("Expect") != ""}
		defer answer.finish()
		r.Body = body
		next.ServeHTTP(answer, r)
	})
}

// earlyAnswer is an answer that may begin before its request's body has come;
// the handler reads nothing of that any more then. What comes of it after the
// answer must not be taken for the next request, so the connection ends with
// the answer, unless all of the body was there.
type earlyAnswer struct {
	http.ResponseWriter
	body  *pacedBody
	begun bool
	// waits says that the client sends no body before it is asked to, which a read does.
	waits bool
}

// Unwrap is for http.ResponseController.
func (a *earlyAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Flush implements http.Flusher.
func (a *earlyAnswer) Flush() {
	a.begin()
	_ = a.body.control.Flush() // a writer that cannot flush has no buffer
}

// WriteHeader sends the status.
func (a *earlyAnswer) WriteHeader(status int) {
	if status >= http.StatusOK {
		a.begin()
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write sends bytes of the answer.
func (a *earlyAnswer) Write(b []byte) (int, error) {
	a.begin()
	return a.ResponseWriter.Write(b)
}

func (a *earlyAnswer) begin() {
	if a.begun {
		return
	}
	a.begun = true
	if a.waits && !a.body.asked || !a.body.arrived() {
		a.Header().Set("Connection", "close")
	}
}

// finish gives the rest of a body a moment after the answer.
func (a *earlyAnswer) finish() {
	if a.begin(); !a.body.ended {
		_ = a.body.control.SetReadDeadline(time.Now().Add(lateBody))
	}
}

// PaceBody makes the body of a request arrive at a pace of its own, in place of
// that of AnswerFirst: of two, either would set its deadline over the other's.
func PaceBody(w http.ResponseWriter, r *http.Request, pace Pace) {
	body, paced := r.Body.(*pacedBody)
	if !paced {
		body = &pacedBody{ReadCloser: r.Body, control: http.NewResponseController(w)}
		r.Body = body
	}
	if pace.Late == nil {
		pace.Late = body.pace.Late
	}
	body.begin(pace)
}

// pacedBody is a body with a deadline that moves with what arrives. It is read
// by one goroutine.
type pacedBody struct {
	io.ReadCloser
	control *http.ResponseController
	pace    Pace
	begun   time.Time
	asked   bool      // for some of it
	set     time.Time // when the deadline was set last
	read    int64
	ended   bool
	late    bool // was counted
}

// begin counts a pace from now on.
func (b *pacedBody) begin(pace Pace) {
	b.pace, b.begun, b.set, b.read = pace, time.Now(), time.Time{}, 0
	b.extend(b.begun)
}

// arrived tells whether the body was read to its end, or all of it waits to be.
func (b *pacedBody) arrived() bool {
	if b.ended {
		return true
	}
	b.pace = Pace{}
	_ = b.control.SetReadDeadline(time.Now())
	_, _ = io.CopyN(io.Discard, b, writePiece) // it is the end that counts
	_ = b.control.SetReadDeadline(time.Time{})
	return b.ended
}

func (b *pacedBody) extend(now time.Time) {
	if b.pace == (Pace{}) || now.Sub(b.set) < rateStep {
		return
	}
	b.set = now
	allowed := b.pace.Grace
	if b.pace.Rate > 0 {
		allowed += time.Duration(float64(b.read) / float64(b.pace.Rate) * float64(time.Second))
	}
	if b.pace.Most > 0 {
		allowed = min(allowed, b.pace.Most)
	}
	_ = b.control.SetReadDeadline(b.begun.Add(allowed)) // a connection without deadlines is gone
}

// Read implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	b.asked = true
	n, err := b.ReadCloser.Read(p)
	b.read += int64(n)
	switch {
	case errors.Is(err, io.EOF) && !b.ended:
		if b.ended = true; b.pace != (Pace{}) {
			// Or the deadline would end the request while it is answered.
			_ = b.control.SetReadDeadline(time.Time{})
		}
	case err == nil:
		b.extend(time.Now())
	case errors.Is(err, os.ErrDeadlineExceeded) && b.pace.Late != nil && !b.late:
		b.late = true
		b.pace.Late.Add(1)
	}
	return n, err
}

// timedConn is a connection whose every write has a deadline, unless the caller
// has set one.
type timedConn struct {
	net.Conn
	limit time.Duration
	slow  *atomic.Uint64 // counts writes that were not taken in time
	given atomic.Bool    // a deadline, by the caller
}

// SetDeadline implements net.Conn.
func (c *timedConn) SetDeadline(t time.Time) error {
	c.given.Store(!t.IsZero())
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline implements net.Conn.
func (c *timedConn) SetWriteDeadline(t time.Time) error {
	c.given.Store(!t.IsZero())
	return c.Conn.SetWriteDeadline(t)
}

// Write implements net.Conn.
func (c *timedConn) Write(b []byte) (written int, err error) {
	for {
		piece := b[:min(len(b), writePiece)]
		if !c.given.Load() {
			if err := c.Conn.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
				return written, err
			}
		}
		n, err := c.Conn.Write(piece)
		written += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.slow.Add(1)
		}
		if b = b[n:]; err != nil || len(b) == 0 {
			return written, err
		}
	}
}
