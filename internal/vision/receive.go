package vision

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"strings"
	"time"

	"fleetd/internal/lobby"
)

// taken is a photo that was stored.
type taken struct {
	bytes  int64
	sha256 string
	heard  time.Time // no later than this the device had sent its last byte
}

// store reads the upload into the bucket. Whatever goes wrong, nothing of it
// stays behind.
func (s *Server) store(w http.ResponseWriter, r *http.Request, u *upload) (taken, error) {
	control := http.NewResponseController(w)
	pace := lobby.Pace{Grace: s.patience, Most: s.patience}
	if s.opt.MinRate > 0 {
		pace.Grace, pace.Rate = min(s.slowGrace, s.patience), s.opt.MinRate
	}
	lobby.PaceBody(w, r, pace)
	if u.kind == KindSnapshot {
		if err := s.bucket.mustBeNew(r.Context(), u.photo); err != nil {
			return taken{}, err
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, MaxUpload+MaxQuestion+overhead)
	form, err := r.MultipartReader()
	if err != nil {
		return taken{}, refuse(http.StatusBadRequest, reasonBadRequest, "the upload must be multipart/form-data with a part named file")
	}
	d := newDraft(s.bucket)
	defer d.free()
	u.question, err = d.readForm(r.Context(), form)
	// While a chunk was being stored the device may have sent all the others.
	heard := time.Now().Add(-d.storing)
	if err == nil {
		// Or the deadline would cut the connection while the answer is made.
		err = control.SetReadDeadline(time.Time{})
	}
	if err == nil {
		err = d.commit(r.Context(), *u)
	}
	if err != nil {
		d.abort(context.WithoutCancel(r.Context()))
		return taken{}, err
	}
	return taken{d.size, hex.EncodeToString(d.sum.Sum(nil)), heard}, nil
}

// readForm takes the parts in whatever order: the firmware sends `question`
// and `file`, snapshots `file` alone. Behind the last boundary there may be
// anything; ML307 modules send a line break (ml307_http.cc:107-111).
func (d *draft) readForm(ctx context.Context, form *multipart.Reader) (question string, err error) {
	var asked, filed bool
	for {
		part, err := form.NextPart()
		switch {
		case errors.Is(err, io.EOF) && filed: // the picture has shown that it is whole
			return question, nil
		case errors.Is(err, io.EOF):
			return "", refuse(http.StatusBadRequest, reasonBadRequest, "the upload has no part named file")
		case err != nil:
			return "", readFault(err)
		}
		switch name := part.FormName(); {
		case name == "question" && !asked:
			asked = true
			if question, err = readQuestion(part); err != nil {
				return "", err
			}
		case name == "file" && !filed:
			filed = true
			if err := d.readFile(ctx, part); err != nil {
				return "", err
			}
		case name == "question" || name == "file":
			return "", refuse(http.StatusBadRequest, reasonBadRequest, "the upload has two parts named %s", name)
		}
	}
}

func readQuestion(part io.Reader) (string, error) {
	text, err := io.ReadAll(io.LimitReader(part, MaxQuestion+1))
	if err != nil {
		return "", readFault(err)
	}
	if len(text) > MaxQuestion {
		return "", refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "the question has more than %d bytes", MaxQuestion)
	}
	return strings.ToValidUTF8(string(text), "\uFFFD"), nil
}

// readFault words an error of the connection or of the multipart format.
func readFault(err error) error {
	tooLarge := (*http.MaxBytesError)(nil)
	switch {
	case errors.As(err, &tooLarge):
		return errPhotoTooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(http.StatusRequestTimeout, reasonSlow, "the upload was slower than --upload-min-rate, or took longer than %v", UploadTime)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(http.StatusBadRequest, reasonBroken, "the upload broke off")
	}
	return refuse(http.StatusBadRequest, reasonBroken, "the upload cannot be read: %v", err)
}

var errPhotoTooLarge = refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "the photo has more than %d bytes", MaxUpload)
