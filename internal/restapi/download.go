package restapi

import (
	"io"
	"net/http"
	"time"
)

// downloadPatience is how long a reader of a file may pause.
const downloadPatience = time.Minute

// download answers with the file that write writes; name, if there is one, is what a browser saves it as. An error before the
// first byte is the answer; a later one breaks the connection, so that the client does not take it for the whole.
func (s *Server) download(w http.ResponseWriter, r *http.Request, mediaType, name string, write func(io.Writer) error) {
	out := &slowWriter{ResponseWriter: w, control: http.NewResponseController(w)}
	out.begin = func() { setFile(w.Header(), mediaType, name, "no-store") }
	switch err := write(out); {
	case err == nil:
		out.start() // it may be empty
		out.end()
	case out.started:
		panic(http.ErrAbortHandler)
	default:
		s.fail(w, r, err)
	}
}

// setFile sets the header of a file; name, if there is one, is what a browser saves it as.
func setFile(h http.Header, mediaType, name, cache string) {
	h.Set("Content-Type", mediaType)
	if name != "" {
		h.Set("Content-Disposition", `attachment; filename="`+name+`"`)
	}
	h.Set("Cache-Control", cache)
}

// slowWriter is an answer whose reader may pause for a while.
type slowWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	begin   func() // sets the header
	started bool
}

func (w *slowWriter) start() {
	if !w.started {
		w.started = true
		w.begin()
	}
}

// end lets the connection take the next request. If that fails, it is closed with the answer.
func (w *slowWriter) end() { _ = w.control.SetWriteDeadline(time.Time{}) }

// Write implements io.Writer.
func (w *slowWriter) Write(p []byte) (int, error) {
	w.start()
	if err := w.control.SetWriteDeadline(time.Now().Add(downloadPatience)); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(p)
}
