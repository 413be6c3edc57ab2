package fleettest

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/apiclient"
)

const takePhoto = "self.camera.take_photo"

// photoAnswer is what the camera tool answers.
type photoAnswer struct {
	Success bool
	Photo   string
	Text    string
}

func askCamera(t *testing.T, node *Node, device, question string) photoAnswer {
	t.Helper()
	arguments, err := json.Marshal(map[string]string{"question": question})
	if err != nil {
		t.Fatal(err)
	}
	r, err := node.Call(t.Context(), device, takePhoto, apiclient.CallRequest{Arguments: arguments})
	if err != nil || r.IsError || len(r.Content) != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	var answer photoAnswer
	if err := json.Unmarshal([]byte(r.Content[0].Text), &answer); err != nil || !answer.Success {
		t.Fatalf("%s: %v", r.Content[0].Text, err)
	}
	return answer
}

// The command line writes the photo that a call took, and not only what the device reports.
func TestCallKeepsThePhoto(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--profile", "fw-2.4", "--devices", "1")
	node.AwaitReady(t, 1)
	file := filepath.Join(t.TempDir(), "photo.jpg")
	out, errs, status := node.Command(t, "call", node.List(t)[0].ID, takePhoto, "question=what is it?", "-o", file)
	picture, err := os.ReadFile(file)
	if status != 0 || err != nil || !bytes.HasPrefix(picture, []byte("\xff\xd8")) || !strings.Contains(out, file+": ") {
		t.Errorf("status %d, %d bytes, %v, stdout %s, stderr %s", status, len(picture), err, out, errs)
	}
}

// A caller of a camera gets the explanation as the tool's answer, and
// the explainer saw the very picture that is stored.
func TestPhotoIsExplained(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	explainer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet { // the diagnosis
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		var body struct {
			Messages []struct {
				Content []struct {
					Text  string
					Image struct{ URL string } `json:"image_url"`
				}
			}
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || len(body.Messages) != 1 || len(body.Messages[0].Content) != 2 {
			t.Errorf("%+v, %v", body, err)
			return
		}
		picture, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(body.Messages[0].Content[1].Image.URL, "data:image/jpeg;base64,"))
		if err != nil {
			t.Error(err)
		}
		sum := sha256.Sum256(picture)
		seen <- hex.EncodeToString(sum[:])
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"You asked: `+body.Messages[0].Content[0].Text+`"}}]}`)
	}))
	t.Cleanup(explainer.Close)
	node := programs.Start(t, "--vision-url", explainer.URL+"/v1", "--vision-model", "seer", "--vision-key", "sk-e2e-9c1d")
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--profile", "fw-2.4", "--devices", "1")
	node.AwaitReady(t, 1)
	answer := askCamera(t, node, node.List(t)[0].ID, "what is this?")
	if answer.Text != "You asked: what is this?" {
		t.Errorf("%+v", answer)
	}
	var jpeg bytes.Buffer
	if _, err := node.Photo(t.Context(), answer.Photo, &jpeg); err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(jpeg.Bytes()); <-seen != hex.EncodeToString(sum[:]) {
		t.Error("the explainer saw another picture")
	}
	if n := node.Metric(t, "fleetd_explanations_total", `outcome="explained"`); n != 1 {
		t.Errorf("fleetd_explanations_total %v", n)
	}
	stdout, _, _ := node.Command(t, "doctor")
	if !strings.Contains(stdout, "--vision-key") || strings.Contains(stdout, "sk-e2e-9c1d") {
		t.Errorf("doctor: %s", stdout)
	}
}
