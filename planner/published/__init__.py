"""Published measurements: their rows read as plans of reference models, and priced."""

from meshwright.planner.published.predict import predict_row as predict_row
