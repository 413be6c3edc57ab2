package vision

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

func TestRefusals(t *testing.T) {
	t.Parallel()
	c := newTestServer(t)
	jpeg, wide := picture(t, 400), picture(t, 16)
	// A header with the dimensions 9000 by 16.
	at := bytes.Index(wide, []byte{0xFF, 0xC0}) + 7
	wide[at], wide[at+1] = 9000>>8, 9000&0xFF
	c.camera(t, robot, strings.NewReader(cameraBody("", jpeg))).must(t) // creates the bucket
	stored := c.messages(t, "C")
	big := picture(t, 1200)
	cases := []struct {
		name, body string
		headers    []string
		status     int
		reason     string
	}{
		{"no device", cameraBody("", jpeg), []string{"Device-Id", ""}, 400, reasonBadRequest},
		{"bad device", cameraBody("", jpeg), []string{"Device-Id", "a/b"}, 400, reasonBadRequest},
		{"no token", cameraBody("", jpeg), []string{"Authorization", ""}, 401, reasonUnauthorized},
		{"bare token", cameraBody("", jpeg), []string{"Authorization", c.mint.UploadToken(string(robot), time.Now().Add(time.Hour))}, 401, reasonUnauthorized},
		{"token of another device", cameraBody("", jpeg), []string{"Authorization", "Bearer " + c.mint.UploadToken(string(other), time.Now().Add(time.Hour))}, 401, reasonUnauthorized},
		{"expired token", cameraBody("", jpeg), []string{"Authorization", "Bearer " + c.mint.UploadToken(string(robot), time.Now())}, 401, reasonUnauthorized},
		{"unknown device", cameraBody("", jpeg), []string{"Device-Id", "unknown", "Authorization", "Bearer " + c.mint.UploadToken("unknown", time.Now().Add(time.Hour))}, 401, reasonUnauthorized},
		{"not multipart", cameraBody("", jpeg), []string{"Content-Type", "image/jpeg"}, 400, reasonBadRequest},
		{"no boundary", cameraBody("", jpeg), []string{"Content-Type", "multipart/form-data"}, 400, reasonBadRequest},
		{"other boundary", cameraBody("", jpeg), []string{"Content-Type", "multipart/form-data; boundary=x"}, 400, reasonBadRequest},
		{"empty", "", nil, 400, reasonBadRequest},
		{"no file", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nq\r\n--" + cameraBoundary + "--\r\n", nil, 400, reasonBadRequest},
		{"two files", strings.TrimSuffix(cameraBody("q", jpeg), "--\r\n") + strings.TrimPrefix(cameraBody("q", jpeg), "--"+cameraBoundary), nil, 400, reasonBadRequest},
		{"two questions", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nq\r\n" + cameraBody("q", jpeg), nil, 400, reasonBadRequest},
		{"long question", cameraBody(strings.Repeat("q", MaxQuestion+1), jpeg), nil, 413, reasonTooLarge},
		{"large photo", cameraBody("", pad(jpeg, MaxUpload+1)), nil, 413, reasonTooLarge},
		{"large rest", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n" + strings.Repeat("x", MaxUpload+MaxQuestion+overhead), nil, 413, reasonTooLarge},
		{"empty file", cameraBody("", nil), nil, 415, reasonNotJPEG},
		{"not a JPEG", cameraBody("", []byte("GIF89a")), nil, 415, reasonNotJPEG},
		{"HTML with a JPEG's beginning", cameraBody("", append([]byte{0xFF, 0xD8, 0xFF}, "<script>"...)), nil, 415, reasonNotJPEG},
		{"cut picture", cameraBody("", jpeg[:len(jpeg)-2]), nil, 415, reasonNotJPEG},
		{"cut big picture", cameraBody("", big[:len(big)-2]), nil, 415, reasonNotJPEG},
		{"bytes after the picture", cameraBody("", append(bytes.Clone(jpeg), "<?php"...)), nil, 415, reasonNotJPEG},
		{"too wide", cameraBody("", wide), nil, 415, reasonNotJPEG},
		{"cut body", cameraBody("q", big)[:len(big)], nil, 400, reasonBroken},
		{"cut before the file", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; na", nil, 400, reasonBadRequest},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			before := c.vision.Uploads.Get(tc.reason)
			r := c.camera(t, robot, strings.NewReader(tc.body), tc.headers...)
			// security: D9
			if r.status != tc.status || c.vision.Uploads.Get(tc.reason) != before+1 {
				t.Errorf("%d %s, want %d %s", r.status, r.raw, tc.status, tc.reason)
			}
			if chunks, objects := c.messages(t, "C"), c.messages(t, "M"); chunks != stored || objects != 1 {
				t.Errorf("%d chunks and %d objects remain", chunks, objects)
			}
		})
	}
	t.Run("revoked", func(t *testing.T) {
		if _, err := c.service.Revoke(t.Context(), devicetest.Admin, robot); err != nil {
			t.Fatal(err)
		}
		// security: D9
		if r := c.camera(t, robot, strings.NewReader(cameraBody("", jpeg))); r.status != http.StatusUnauthorized {
			t.Errorf("%d %s", r.status, r.raw)
		}
	})
	if n := len(c.ports.Seen(devices.EventPhoto)); n != 1 {
		t.Errorf("%d events", n)
	}
}

// An upload that the device interrupts leaves no chunks.
func TestAborted(t *testing.T) {
	c := newTestServer(t)
	big := picture(t, 1200)
	reader, writer := io.Pipe()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+PathExplain, reader)
	if err != nil {
		t.Fatal(err)
	}
	_, token, _ := c.vision.Grant(robot, time.Now())
	r.Header.Set("Device-Id", string(robot))
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "multipart/form-data; boundary="+cameraBoundary)
	ended := make(chan error, 1)
	go func() {
		answer, err := http.DefaultClient.Do(r)
		if err == nil {
			_ = answer.Body.Close()
		}
		ended <- err
	}()
	if _, err := io.WriteString(writer, cameraBody("q", big)[:2*chunkSize+5000]); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "chunks are stored", func() bool {
		_, err := c.js.Stream(t.Context(), "OBJ_"+bucketName)
		return err == nil && c.messages(t, "C") == 2
	})
	_ = writer.CloseWithError(errors.New("out of battery"))
	if err := <-ended; err == nil {
		t.Error("the upload got a response")
	}
	devicetest.Eventually(t, "the chunks are removed", func() bool { return c.messages(t, "C") == 0 })
	devicetest.Eventually(t, "it counts as broken", func() bool { return c.vision.Uploads.Get(reasonBroken) == 1 })
	if n := c.messages(t, "M"); n != 0 {
		t.Errorf("%d objects", n)
	}
}

// A very slow upload is closed.
func TestSlowUpload(t *testing.T) {
	c := newTestServer(t)
	c.vision.uploadTime = 100 * time.Millisecond
	reader, writer := io.Pipe()
	defer writer.Close()
	result := make(chan result, 1)
	go func() { result <- c.camera(t, robot, reader) }()
	if _, err := io.WriteString(writer, "--"); err != nil {
		t.Fatal(err)
	}
	if r := <-result; r.status != http.StatusRequestTimeout || c.vision.Uploads.Get(reasonSlow) != 1 {
		t.Errorf("%d %s", r.status, r.raw)
	}
}

// One device cannot use the slots of the others.
func TestTooManyUploadsOfOneDevice(t *testing.T) {
	c := newTestServer(t)
	body := cameraBody("q", picture(t, 64))
	results := make(chan result, MaxPerDevice)
	var writers []*io.PipeWriter
	for range MaxPerDevice {
		reader, writer := io.Pipe()
		writers = append(writers, writer)
		go func() { results <- c.camera(t, robot, reader) }()
		if _, err := io.WriteString(writer, body[:100]); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "all are in progress", func() bool { return c.vision.InProgress.Load() == MaxPerDevice })
	if r := c.camera(t, robot, strings.NewReader(body)); r.status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", r.status, r.raw)
	}
	c.camera(t, other, strings.NewReader(body)).must(t)
	for _, w := range writers {
		go func() {
			_, _ = io.WriteString(w, body[100:])
			_ = w.Close()
		}()
	}
	for range MaxPerDevice {
		(<-results).must(t)
	}
}

func TestTooManyUploads(t *testing.T) {
	c := newTestServer(t, func(o *Options) { o.PerDevice, o.PerAddress = MaxUploads, MaxUploads })
	jpeg := picture(t, 64)
	body := cameraBody("q", jpeg)
	results := make(chan result, MaxUploads)
	var writers []*io.PipeWriter
	for range MaxUploads {
		reader, writer := io.Pipe()
		writers = append(writers, writer)
		go func() { results <- c.camera(t, robot, reader) }()
		if _, err := io.WriteString(writer, body[:100]); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "all are in progress", func() bool { return c.vision.InProgress.Load() == MaxUploads })
	if r := c.camera(t, other, strings.NewReader(body)); r.status != http.StatusServiceUnavailable || c.vision.Uploads.Get(reasonBusy) != 1 {
		t.Errorf("%d %s", r.status, r.raw)
	}
	for _, w := range writers {
		go func() {
			_, _ = io.WriteString(w, body[100:])
			_ = w.Close()
		}()
	}
	for range MaxUploads {
		(<-results).must(t)
	}
	c.camera(t, other, strings.NewReader(body)).must(t)
}
