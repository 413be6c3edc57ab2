package firmware

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"strconv"
)

// maxUploads bounds the photo and snapshot lists of one device in the report.
const maxUploads = 1000

// picture draws what a device's camera sees: a gradient with blocks that spell device, kind and number, so that no two
// pictures of a fleet have the same bytes.
func picture(w, h, quality int, who, kind string, n int) ([]byte, error) {
	sum := derive(uint64(n), who, kind)
	img := image.NewYCbCr(image.Rect(0, 0, w, h), image.YCbCrSubsampleRatio420)
	for y := range h {
		row := img.Y[y*img.YStride : y*img.YStride+w]
		for x := range row {
			cell := (y*16/h)*16 + x*16/w
			row[x] = byte(32 + x*96/w + y*32/h)
			if sum[cell/8]>>(cell%8)&1 == 1 {
				row[x] += 80
			}
		}
	}
	for i := range img.Cb {
		img.Cb[i], img.Cr[i] = sum[i%7], sum[8+i%5]
	}
	var out bytes.Buffer
	if err := jpeg.Encode(&out, img, &jpeg.Options{Quality: quality}); err != nil {
		return nil, fmt.Errorf("encode picture: %w", err)
	}
	return out.Bytes(), nil
}

// takePhoto is Capture and Explain (main/boards/common/esp32_camera.cc:172-339). It blocks the main loop, so nothing
// else is answered meanwhile.
func (d *Device) takePhoto(question string) (outcome, error) {
	answer, err := d.explain(d.fleet.ctx, question)
	switch {
	case errors.Is(err, errHang):
		d.fail(err)
		return outcome{}, err
	case err != nil && d.profile.cameraText:
		return text(`{"success": false, "message": "` + err.Error() + `"}`)
	case err != nil:
		return outcome{}, err
	}
	return text(answer)
}

func (d *Device) explain(ctx context.Context, question string) (string, error) {
	d.mu.Lock()
	url, token, n := d.visionURL, d.visionToken, len(d.stats.photos)
	d.mu.Unlock()
	if url == "" {
		return "", toolError("Image explain URL or token is not set")
	}
	o := d.fleet.options
	photo, err := picture(o.PhotoWidth, o.PhotoHeight, 80, d.clientID, "photo", n)
	if err != nil {
		return "", toolError("Failed to encode image to JPEG")
	}
	const boundary = "----ESP32_CAMERA_BOUNDARY"
	headers := make([]header, 0, 5)
	if token != "" {
		headers = append(headers, header{"Authorization", "Bearer " + token})
	}
	headers = append(headers, header{"Client-Id", d.clientID},
		header{"Content-Type", "multipart/form-data; boundary=" + boundary},
		header{"Device-Id", d.id}, header{"Transfer-Encoding", "chunked"})
	call, err := openHTTP(ctx, d.fleet.dialer, d.index, "POST", url, headers, nil)
	if err != nil {
		return "", toolError("Failed to connect to explain URL")
	}
	defer func() { _ = call.close() }()
	status, _ := call.sendParts(
		"--"+boundary+"\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\n"+question+"\r\n",
		"--"+boundary+"\r\nContent-Disposition: form-data; name=\"file\"; filename=\"camera.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n",
		string(photo),
		"\r\n--"+boundary+"--\r\n",
	)
	record := PhotoRecord{SHA256: hexSHA256(photo), Bytes: len(photo), Question: question, Status: status}
	answer, err := "", error(nil)
	if status == 200 {
		body, fault := call.body()
		if errors.Is(fault, errHang) {
			err = fault
		} else if fault == nil {
			// A body cut short reads as an empty string, which counts as success.
			answer = string(body)
		}
	} else {
		err = toolError("Failed to upload photo")
	}
	record.Answer = answer
	d.mu.Lock()
	if len(d.stats.photos) < maxUploads {
		d.stats.photos = append(d.stats.photos, record)
	}
	d.mu.Unlock()
	return answer, err
}

// sendParts writes the body in chunks, ends it and returns the answer's status, -1 when there is none.
func (c *httpCall) sendParts(parts ...string) (int, error) {
	for _, p := range parts {
		// A server may answer before it has read everything: the answer counts, so a failed write is not the end.
		if c.chunk([]byte(p)) != nil {
			break
		}
	}
	_ = c.chunk(nil)
	status, err := c.status()
	if err != nil {
		return -1, err
	}
	return status, nil
}

// uploadSnapshot is self.screen.snapshot: no Device-Id and no Authorization header.
func (d *Device) uploadSnapshot(url string, quality int) (outcome, error) {
	d.mu.Lock()
	n := len(d.stats.snapshots)
	d.mu.Unlock()
	shot, err := picture(d.profile.width, d.profile.height, quality, d.clientID, "screen", n)
	if err != nil {
		return outcome{}, toolError("Failed to snapshot screen")
	}
	const boundary = "----ESP32_SCREEN_SNAPSHOT_BOUNDARY"
	headers := []header{{"Content-Type", "multipart/form-data; boundary=" + boundary}}
	call, err := openHTTP(d.fleet.ctx, d.fleet.dialer, d.index, "POST", url, headers, nil)
	if err != nil {
		return outcome{}, toolError("Failed to open URL: " + url)
	}
	defer func() { _ = call.close() }()
	status, _ := call.sendParts(
		"--"+boundary+"\r\nContent-Disposition: form-data; name=\"file\"; filename=\"screenshot.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n",
		string(shot),
		"\r\n--"+boundary+"--\r\n",
	)
	d.mu.Lock()
	if len(d.stats.snapshots) < maxUploads {
		d.stats.snapshots = append(d.stats.snapshots, SnapshotRecord{SHA256: hexSHA256(shot), Bytes: len(shot), Status: status})
	}
	d.mu.Unlock()
	if status != 200 {
		return outcome{}, toolError("Unexpected status code: " + strconv.Itoa(status))
	}
	if _, err := call.body(); errors.Is(err, errHang) {
		d.fail(err)
		return outcome{}, err
	}
	return flagText(true)
}

func hexSHA256(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
