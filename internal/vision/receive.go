package vision

import (
	"context"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"strings"
	"time"
)

// store reads the upload into the bucket. Whatever goes wrong, nothing of it
// stays behind.
func (s *Server) store(w http.ResponseWriter, r *http.Request, u upload) (size int64, question string, err error) {
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(s.patience)); err != nil {
		return 0, "", unavailable(err)
	}
	if u.kind == KindSnapshot {
		if err := s.bucket.mustBeNew(r.Context(), u.photo); err != nil {
			return 0, "", err
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, MaxUpload+MaxQuestion+overhead)
	form, err := r.MultipartReader()
	if err != nil {
		return 0, "", refuse(http.StatusBadRequest, reasonBadRequest, "the upload must be multipart/form-data with a part named file")
	}
	d := newDraft(s.bucket)
	defer d.free()
	question, err = d.readForm(r.Context(), form)
	if err == nil {
		// Or the deadline would cut the connection while the answer is made.
		err = control.SetReadDeadline(time.Time{})
	}
	if err == nil {
		u.question = question
		err = d.commit(r.Context(), u)
	}
	if err != nil {
		d.abort(context.WithoutCancel(r.Context()))
		return 0, "", err
	}
	return d.size, question, nil
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
		return refuse(http.StatusRequestTimeout, reasonSlow, "the upload took longer than %v", UploadTime)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(http.StatusBadRequest, reasonBroken, "the upload broke off")
	}
	return refuse(http.StatusBadRequest, reasonBroken, "the upload cannot be read: %v", err)
}

var errPhotoTooLarge = refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "the photo has more than %d bytes", MaxUpload)
