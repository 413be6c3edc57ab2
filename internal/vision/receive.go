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

	"fleetd/internal/connlimit"
)

// storedPhoto is a stored photo.
type storedPhoto struct {
	bytes      int64
	sha256     string
	receivedBy time.Time // latest time at which the device had sent its last byte
}

// store reads the upload into the bucket. On an error nothing of it remains.
func (s *Server) store(w http.ResponseWriter, r *http.Request, u *upload) (storedPhoto, error) {
	control := http.NewResponseController(w)
	pace := connlimit.BodyPace{Grace: s.uploadTime, Max: s.uploadTime}
	if s.opt.MinRate > 0 {
		pace.Grace, pace.Rate = min(s.slowGrace, s.uploadTime), s.opt.MinRate
	}
	connlimit.PaceBody(w, r, pace)
	if u.kind == KindSnapshot {
		if err := s.bucket.mustBeNew(r.Context(), u.photo); err != nil {
			return storedPhoto{}, err
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, MaxUpload+MaxQuestion+overhead)
	form, err := r.MultipartReader()
	if err != nil {
		return storedPhoto{}, refuse(http.StatusBadRequest, reasonBadRequest, "the upload must be multipart/form-data with a part named file")
	}
	d := newDraft(s.bucket)
	defer d.free()
	u.question, err = d.readForm(r.Context(), form)
	// While a chunk was stored, the device may have sent all of the rest.
	receivedBy := time.Now().Add(-d.storing)
	if err == nil {
		// Otherwise the deadline would end the connection during the response.
		err = control.SetReadDeadline(time.Time{})
	}
	if err == nil {
		err = d.commit(r.Context(), *u)
	}
	if err != nil {
		d.abort(context.WithoutCancel(r.Context()))
		return storedPhoto{}, err
	}
	return storedPhoto{d.size, hex.EncodeToString(d.sum.Sum(nil)), receivedBy}, nil
}

// readForm reads the parts in any order: the firmware sends `question` and `file`, snapshots
// only `file`. Any bytes may follow the last boundary; ML307 modules send a line break
// (ml307_http.cc:107-111).
func (d *draft) readForm(ctx context.Context, form *multipart.Reader) (question string, err error) {
	var asked, filed bool
	for {
		part, err := form.NextPart()
		switch {
		case errors.Is(err, io.EOF) && filed: // readFile has checked that the picture is complete
			return question, nil
		case errors.Is(err, io.EOF):
			return "", refuse(http.StatusBadRequest, reasonBadRequest, "the upload has no part named file")
		case err != nil:
			return "", readError(err)
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
		return "", readError(err)
	}
	if len(text) > MaxQuestion {
		return "", refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "the question has more than %d bytes", MaxQuestion)
	}
	return strings.ToValidUTF8(string(text), "\uFFFD"), nil
}

// readError converts an error of the connection or of the multipart format.
func readError(err error) error {
	tooLarge := (*http.MaxBytesError)(nil)
	switch {
	case errors.As(err, &tooLarge):
		return errPhotoTooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(http.StatusRequestTimeout, reasonSlow, "the upload was slower than --upload-min-rate, or took longer than %v", UploadTime)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(http.StatusBadRequest, reasonBroken, "the upload is incomplete")
	}
	return refuse(http.StatusBadRequest, reasonBroken, "the upload cannot be read: %v", err)
}

var errPhotoTooLarge = refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "the photo has more than %d bytes", MaxUpload)
