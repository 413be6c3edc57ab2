package connlimit

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

// Time limits of request bodies and responses.
const (
	// WriteTime is how long one piece of a response may wait until the client reads it.
	WriteTime = 15 * time.Second
	// UnreadTime is how long written bytes may wait for a client that acknowledges none of them.
	UnreadTime = 30 * time.Second
	writePiece = 64 << 10             // bytes; a slow reader of a large response is given WriteTime for each piece
	lateBytes  = 64 << 20             // of a body that are read after the response
	latePause  = 4 * time.Millisecond // after each writePiece of them
	// rateStep is how often the deadline of a body is moved.
	rateStep = 250 * time.Millisecond
)

// BodyPace is the slowest rate at which a body may arrive. The deadline is Grace,
// plus the time that the received bytes take at Rate bytes per second (0: nothing is
// added), and at most Max (0: no maximum). The zero BodyPace sets no deadlines.
type BodyPace struct {
	Grace time.Duration
	Rate  int64
	Max   time.Duration
	Late  *atomic.Uint64 // counts bodies that were too slow; may be nil
}

// DefaultPace is the pace of routes that do not set their own.
var DefaultPace = BodyPace{Grace: 10 * time.Second, Rate: 2 << 10}

// latePace is the pace of the rest of a body after the response. A client that is still sending keeps its connection, and
// then receives the response instead of a connection reset.
var latePace = BodyPace{Grace: time.Second, Rate: 64 << 10, Max: 10 * time.Second}

// RespondEarly lets a handler respond before the body has arrived, so that a refusal
// is sent at once. It closes connections whose body does not follow the response.
// Bodies that arrive more slowly than pace end with a timeout.
func RespondEarly(next http.Handler, pace BodyPace) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// net/http gives requests without a body this value.
		if r.Body == nil || r.Body == http.NoBody || pace == (BodyPace{}) && r.Method == http.MethodGet { // a WebSocket upgrade is a GET and has no body
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
		answer := &earlyResponse{ResponseWriter: w, body: body, expectsContinue: r.Header.Get("Expect") != ""}
		defer answer.finish()
		r.Body = body
		next.ServeHTTP(answer, r)
	})
}

// earlyResponse is a response that may begin before the body of its request has
// arrived; the handler reads no more of the body from then on. Bytes of the body
// that arrive after the response must not be parsed as the next request. The
// connection is therefore closed after the response, unless the whole body has
// arrived.
type earlyResponse struct {
	http.ResponseWriter
	body  *pacedBody
	begun bool
	// expectsContinue is set if the client sends its body only after a 100 Continue, which the first read sends.
	expectsContinue bool
}

// Unwrap implements the interface that http.ResponseController uses.
func (a *earlyResponse) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Flush implements http.Flusher.
func (a *earlyResponse) Flush() {
	a.begin()
	_ = a.body.control.Flush() // a writer that cannot flush has no buffer
}

// WriteHeader sends the status.
func (a *earlyResponse) WriteHeader(status int) {
	if status >= http.StatusOK {
		a.begin()
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write sends bytes of the response.
func (a *earlyResponse) Write(b []byte) (int, error) {
	a.begin()
	return a.ResponseWriter.Write(b)
}

func (a *earlyResponse) begin() {
	if a.begun {
		return
	}
	a.begun = true
	if a.expectsContinue && !a.body.readCalled || !a.body.arrived() {
		a.Header().Set("Connection", "close")
	}
}

// finish reads the rest of the body after the response, at latePace, and not as fast as it can arrive, which would keep
// processors busy. A client that was never asked for its body sends none.
func (a *earlyResponse) finish() {
	if a.begin(); a.body.ended || a.expectsContinue && !a.body.readCalled {
		return
	}
	_ = a.body.control.Flush()
	a.body.begin(latePace)
	for read := 0; read < lateBytes; read += writePiece {
		if _, err := io.CopyN(io.Discard, a.body, writePiece); err != nil {
			return // the connection is closed in any case
		}
		time.Sleep(latePause)
	}
}

// PaceBody sets the pace of one request's body. It replaces the pace of RespondEarly:
// two paces would overwrite each other's deadlines.
func PaceBody(w http.ResponseWriter, r *http.Request, pace BodyPace) {
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

// pacedBody is a body with a deadline that moves as bytes arrive. Only one
// goroutine may read it.
type pacedBody struct {
	io.ReadCloser
	control       *http.ResponseController
	pace          BodyPace
	begun         time.Time
	readCalled    bool      // Read was called
	deadlineSetAt time.Time // when the deadline was last set
	read          int64
	ended         bool
	lateCounted   bool // the timeout was counted
}

// begin starts the pace at the current time.
func (b *pacedBody) begin(pace BodyPace) {
	b.pace, b.begun, b.deadlineSetAt, b.read = pace, time.Now(), time.Time{}, 0
	b.extend(b.begun)
}

// arrived reports whether the body was read to its end, or the rest of it is in the
// receive buffer.
func (b *pacedBody) arrived() bool {
	if b.ended {
		return true
	}
	b.pace = BodyPace{}
	_ = b.control.SetReadDeadline(time.Now())
	_, _ = io.CopyN(io.Discard, b, writePiece) // b.ended holds the result
	_ = b.control.SetReadDeadline(time.Time{})
	return b.ended
}

func (b *pacedBody) extend(now time.Time) {
	if b.pace == (BodyPace{}) || now.Sub(b.deadlineSetAt) < rateStep {
		return
	}
	b.deadlineSetAt = now
	allowed := b.pace.Grace
	if b.pace.Rate > 0 {
		allowed += time.Duration(float64(b.read) / float64(b.pace.Rate) * float64(time.Second))
	}
	if b.pace.Max > 0 {
		allowed = min(allowed, b.pace.Max)
	}
	_ = b.control.SetReadDeadline(b.begun.Add(allowed)) // fails only if the connection is closed
}

// Read implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	b.readCalled = true
	n, err := b.ReadCloser.Read(p)
	b.read += int64(n)
	switch {
	case errors.Is(err, io.EOF) && !b.ended:
		if b.ended = true; b.pace != (BodyPace{}) {
			// Otherwise the deadline would end the request while the handler responds.
			_ = b.control.SetReadDeadline(time.Time{})
		}
	case err == nil:
		b.extend(time.Now())
	case errors.Is(err, os.ErrDeadlineExceeded) && b.pace.Late != nil && !b.lateCounted:
		b.lateCounted = true
		b.pace.Late.Add(1)
	}
	return n, err
}

// timedConn is a connection with a deadline for each write, unless the caller has
// set one.
type timedConn struct {
	net.Conn
	limit       time.Duration
	slow        *atomic.Uint64 // counts writes that timed out
	deadlineSet atomic.Bool    // the caller has set a deadline
}

// SetDeadline implements net.Conn.
func (c *timedConn) SetDeadline(t time.Time) error {
	c.deadlineSet.Store(!t.IsZero())
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline implements net.Conn.
func (c *timedConn) SetWriteDeadline(t time.Time) error {
	c.deadlineSet.Store(!t.IsZero())
	return c.Conn.SetWriteDeadline(t)
}

// Write implements net.Conn.
func (c *timedConn) Write(b []byte) (written int, err error) {
	for {
		piece := b[:min(len(b), writePiece)]
		if !c.deadlineSet.Load() {
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
